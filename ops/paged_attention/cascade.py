"""Cascade attention: keys that all sequences begin with are read once for all of them."""

import torch

from vllm_triton.ops.merge_attention_states import merge_attention_states
from vllm_triton.ops.paged_attention.op import paged_attention


def cascade_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_shared_blocks: int,
    scale: float,
    softcap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """paged_attention without a window, for sequences whose first blocks are the same.

    All queries attend together, as one sequence, to the shared keys, which no causal bound concerns; each sequence then
    attends to the rest of its own, and merge_attention_states puts the two together.

    Args: as of paged_attention, and
        num_shared_blocks: so many entries are equal in all rows of block_table that have tokens, at least 1; the first
            row has tokens, and each row's new tokens come after its shared ones.
    Returns: nothing. Mutates: out; its padding rows hold anything afterwards.
    Raises: ShapeError, DTypeError.
    Source: Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding".
    """
    num_tokens, num_heads, _ = query.shape
    num_shared = num_shared_blocks * key_cache.shape[1]
    shared, own = torch.empty_like(query), torch.empty_like(query)
    shared_lse, own_lse = query.new_empty((2, num_tokens, num_heads), dtype=torch.float32)
    all_queries = torch.tensor([0, num_tokens], dtype=torch.int32, device=query.device)
    shared_len = torch.tensor([num_shared], dtype=torch.int32, device=query.device)
    table = block_table[:1, :num_shared_blocks]
    extras = (softcap, False, None, key_scale, value_scale, shared_lse)
    paged_attention(shared, query, key_cache, value_cache, table, shared_len, all_queries, scale, 0, *extras)
    # Rows without tokens stay without keys.
    own_lens, own_table = (seq_lens - num_shared).clamp_(min=0), block_table[:, num_shared_blocks:]
    extras = (softcap, True, None, key_scale, value_scale, own_lse)
    paged_attention(own, query, key_cache, value_cache, own_table, own_lens, query_start_loc, scale, 0, *extras)
    merge_attention_states(out, shared, shared_lse, own, own_lse)
