"""Paged attention in torch calls, for platforms where Triton does not run.

Rows with one query (decode) are gathered into one padded batch; rows with more take one call each. The heads that share
a KV head are folded into the query length, or into a head dimension of stride 0, so that no key is copied per head.
Both ways reach torch's flash kernel, which accumulates in float32. It has no soft cap, sinks, quantized keys or
log-sum-exp: calls with one of them take the reference's way.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_triton.ops.paged_attention.op import paged_attention
from vllm_triton.ops.paged_attention.reference import paged_attention_reference
from vllm_triton.ops.registry import HOST_READS

# Decode rows go together while they gather no more keys than this, so that what was gathered is still in the cache when
# it is used (2 cores, 3 heads of 64: 16384 keys in one call took a fifth longer than in four), and while padding does
# not more than double a row, except for short ones, where a call costs more (about 60 us) than the padding.
KEYS_PER_CALL = 8192
SHORT_ROW = 256


@paged_attention.impl("torch", capture=HOST_READS)
def paged_attention_torch(
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
    if softcap or not is_causal or any(tensor is not None for tensor in (sinks, key_scale, lse)):
        extras = (softcap, is_causal, sinks, key_scale, value_scale, lse)
        paged_attention_reference(
            out, query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, window, *extras
        )
        return
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    decoding = [row for row in range(len(lengths)) if starts[row + 1] - starts[row] == 1]
    alone = [row for row in range(len(lengths)) if starts[row + 1] - starts[row] > 1]
    for rows in _groups(decoding, [min(length, window) if window else length for length in lengths]):
        if len(rows) == 1:
            alone.extend(rows)
            continue
        index = torch.tensor(rows, device=query.device)
        tokens = query_start_loc.index_select(0, index)
        keys, values, mask = _gather_padded(
            key_cache,
            value_cache,
            block_table.index_select(0, index),
            [lengths[row] for row in rows],
            window,
        )
        folded = query.index_select(0, tokens).unflatten(1, (key_cache.shape[2], -1))  # [rows, G, H/G, D]
        result = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        out.index_copy_(0, tokens.long(), result.flatten(1, 2))
    for row in alone:
        these = slice(starts[row], starts[row + 1])
        _attend_alone(out[these], query[these], key_cache, value_cache, block_table[row], lengths[row], scale, window)


def _groups(rows: list[int], num_keys: list[int]) -> list[list[int]]:
    """Splits rows into batches that are padded to their first, longest row."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda row: -num_keys[row]):
        similar = longest <= max(SHORT_ROW, 2 * num_keys[row])
        if not groups or not similar or longest * (len(groups[-1]) + 1) > KEYS_PER_CALL:
            groups.append([])
            longest = num_keys[row]
        groups[-1].append(row)
    return groups


def _gather_padded(
    key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor, lengths: list[int], window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values of one query per row, [rows, G, N, D], and which are real, [rows, 1, 1, N] (None for all).

    Padding repeats the row's last position, so that it is finite and the softmax can mask it.
    """
    slots_per_page = key_cache.shape[1]
    lasts = torch.tensor(lengths, device=tables.device)[:, None] - 1
    counts = [min(length, window) if window else length for length in lengths]
    positions = torch.arange(max(counts), device=tables.device)[None, :]
    if window:
        positions = positions + (lasts - window + 1).clamp_(min=0)
    real = positions <= lasts
    positions = torch.minimum(positions, lasts)
    pages = tables.gather(1, positions // slots_per_page)
    slots = positions % slots_per_page
    mask = None if min(counts) == max(counts) else real[:, None, None, :]
    keys, values = (_gather(cache, pages, slots).transpose(1, 2) for cache in (key_cache, value_cache))
    return keys, values, mask


def _gather(cache: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[rows, N, G, D] out of [P, S, G, D]."""
    num_pages, slots_per_page, num_heads, head_size = cache.shape
    page_stride, slot_stride, head_stride, _ = cache.stride()
    if page_stride % slot_stride != 0:
        return cache[pages, slots]
    # One long row of slots: index_select copies slots whole, ten times as fast as two indices do.
    slots_apart = page_stride // slot_stride
    flat = cache.as_strided(
        ((num_pages - 1) * slots_apart + slots_per_page, num_heads, head_size), (slot_stride, head_stride, 1)
    )
    index = (pages * slots_apart + slots).flatten()
    return flat.index_select(0, index).unflatten(0, pages.shape)


def _attend_alone(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    blocks: torch.Tensor,
    seq_len: int,
    scale: float,
    window: int,
) -> None:
    """One sequence: out and query are [n, H, D], blocks its row of the block table."""
    num_queries = query.shape[0]
    slots_per_page, num_kv_heads = key_cache.shape[1:3]
    context = seq_len - num_queries
    first = max(context - window + 1, 0) if window else 0
    first_block = first // slots_per_page
    pages = blocks[first_block : (seq_len - 1) // slots_per_page + 1]
    seen = slice(first - first_block * slots_per_page, seq_len - first_block * slots_per_page)
    keys, values = (
        cache.index_select(0, pages).flatten(0, 1)[seen].transpose(0, 1) for cache in (key_cache, value_cache)
    )  # [G, N, D]
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [n, G, H/G, D]
    if num_queries == 1:
        result = scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
        out.copy_(result.flatten(1, 2))
        return
    grouped = grouped.permute(1, 2, 0, 3)
    shape = (*grouped.shape[:2], *keys.shape[1:])
    keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
    causal = first == context == 0 and (window == 0 or window >= seq_len)
    mask = None if causal else _visible(context, seq_len, first, window, query.device)
    result = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=causal, scale=scale)
    out.unflatten(1, (num_kv_heads, -1)).copy_(result.permute(2, 0, 1, 3))


def _visible(context: int, seq_len: int, first: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys, from position `first` on, each query sees: [n, N] bool."""
    distance = torch.arange(context, seq_len, device=device)[:, None] - torch.arange(first, seq_len, device=device)
    return (distance >= 0) & (distance < window) if window else distance >= 0
