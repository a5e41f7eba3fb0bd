import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, QUANTIZED, Dims, Scalar, Tensor
from vllm_triton.ops.paged_attention.batches import arrange_batch, draw_dims
from vllm_triton.ops.paged_attention.reference import paged_attention_reference
from vllm_triton.ops.registry import define_op


def _constraint(dims: Dims) -> str | None:
    if dims["G"] < 1 or dims["H"] % dims["G"] != 0:
        return f"query must have a multiple of key_cache's G = {dims['G']} heads, got {dims['H']}"
    if dims.get("Q", 1) not in (1, dims["G"]):
        return f"key_scale must have 1 element or G = {dims['G']}, got {dims['Q']}"
    return None


def _combination(arguments: Mapping[str, Any]) -> str | None:
    if not arguments["is_causal"] and arguments["window"]:
        return f"window must be 0 where is_causal is False, got {arguments['window']}"
    return why_not_cache(arguments, "query")


def why_not_cache(arguments: Mapping[str, Any], like: str) -> str | None:
    """Why the caches do not go with the argument `like`, or with their scales; None where they do."""
    cache, dtype = arguments["key_cache"].dtype, arguments[like].dtype
    scales = [name for name in ("key_scale", "value_scale") if arguments[name] is not None]
    if cache not in QUANTIZED:
        if cache != dtype:
            return f"key_cache must have the dtype of {like}, {dtype}, or a quantized one, got {cache}"
        return f"{scales[0]} must be None for a cache of {cache}, got a tensor" if scales else None
    if len(scales) < 2:
        return f"key_scale and value_scale must be tensors for a cache of {cache}, got None"
    return None


def _full_batch(num_sequences: int, queries: int, blocks: int, heads: int, kv_heads: int, head_size: int) -> Dims:
    return {
        "T": num_sequences * queries,
        "H": heads,
        "G": kv_heads,
        "D": head_size,
        "S": 16,
        "B": num_sequences,
        "M": blocks,
        "P": num_sequences * blocks + 1,
        "Q": 1,
    }


@define_op(
    args={
        "out": Tensor("T H D", FLOATS, mutated=True),
        "query": Tensor("T H D", "out"),
        "key_cache": Tensor("P S G D", FLOATS + QUANTIZED),
        "value_cache": Tensor("P S G D", "key_cache"),
        "block_table": Tensor("B M", (torch.int32,)),
        "seq_lens": Tensor("B", (torch.int32,)),
        "query_start_loc": Tensor("B+1", (torch.int32,)),
        "scale": Scalar(float, "be finite and greater than 0", lambda scale: 0 < scale < math.inf, example=0.125),
        "window": Scalar(int, "be at least 0 (0 means no window)", lambda window: window >= 0, example=0),
        "softcap": Scalar(
            float, "be finite and at least 0 (0 means none)", lambda cap: 0 <= cap < math.inf, example=0.0
        ),
        "is_causal": Scalar(bool, "be a bool", lambda is_causal: True, example=True),
        "sinks": Tensor("H", (torch.float32,), optional=True),
        "key_scale": Tensor("Q", (torch.float32,), optional=True),
        "value_scale": Tensor("Q", (torch.float32,), optional=True),
        "lse": Tensor("T H", (torch.float32,), optional=True, mutated=True),
    },
    reference=paged_attention_reference,
    constraint=_constraint,
    combination=_combination,
    # Upper bounds: every query against M * S keys; shapes do not say how much of a table is used.
    flops=lambda dims: 4 * dims["T"] * dims["H"] * dims["D"] * dims["M"] * dims["S"],
    bytes=lambda dims, itemsize: (
        2 * itemsize * dims["D"] * (dims["B"] * dims["M"] * dims["S"] * dims["G"] + dims["T"] * dims["H"])
    ),
    test_dims=draw_dims,
    bench_dims={
        "smollm2 decode, 1 x 304": _full_batch(1, 1, 19, 9, 3, 64),
        "smollm2 decode, 32 x 208": _full_batch(32, 1, 13, 9, 3, 64),
        "smollm2 decode, 8 x 1024": _full_batch(8, 1, 64, 9, 3, 64),
        "smollm2 prefill, 1 x 1024": _full_batch(1, 1024, 64, 9, 3, 64),
        "smollm2 prefill, 4 x 1024": _full_batch(4, 1024, 64, 9, 3, 64),
        "llama-3-8b decode, 32 x 2048": _full_batch(32, 1, 128, 32, 8, 128),
    },
    arrange=arrange_batch,
    uses_dot=True,
    uses_kv_cache=True,
)
def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
    is_causal: bool = True,
    sinks: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of each sequence's new tokens over its paged keys and values; prefill, decode and mixtures.

        out[t, h] = sum_j softmax_j(score_j) value[j, h // (H / G)]
        score_j = scale * query[t, h] . key[j, h // (H / G)]

    where j runs over the positions p - window < j <= p of the sequence (all j <= p without a window), p is the position
    of token t, and position j lies in slot j % S of page block_table[b, j // S].

    Args:
        out: [T, H, D] fp16|bf16|fp32, written for tokens below query_start_loc[B]; padding rows beyond are left alone.
        query: [T, H, D]; the tokens of sequence b are rows query_start_loc[b] .. query_start_loc[b + 1] - 1.
        key_cache, value_cache: [P, S, G, D], H a multiple of G; pages may be views with any stride. Slots that no
            query sees may hold anything, NaN too. Their dtype is the query's, or fp8 e4m3 or int8 with scales.
        block_table: [B, M] int32, pages of each sequence in order; entries that no query sees are not read.
        seq_lens: [B] int32, tokens of each sequence with this step's; the new tokens are its last ones.
        query_start_loc: [B + 1] int32, non-decreasing from 0, at most T; a row without tokens is padding.
        scale: factor on the scores, > 0, usually 1 / sqrt(D).
        window: positions that a token sees, itself included; 0 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        is_causal: False lets every query see all keys of its sequence; then without a window.
        sinks: [H] fp32, per head the score of one more key, whose value is zero.
        key_scale, value_scale: [1] or [G] fp32, what the elements of a quantized cache are multiplied by.
        lse: [T, H] fp32, gets log sum_j exp(score_j), the sink included; -inf for a query that sees nothing, whose out
            is zero. Padding rows are left alone.
    Returns: nothing; accumulates in fp32.
    Mutates: out, lse.
    Raises: ShapeError, DTypeError.
    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
        section 4; Dao, "FlashAttention-2", algorithm 1; Xiao et al., "Efficient Streaming Language Models with
        Attention Sinks"; Gemma Team, "Gemma 2", section 2 (softcap).
    """
