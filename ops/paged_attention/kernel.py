"""Paged attention: one program a tile of queries and KV head, online softmax over tiles of keys in float32.

A tile holds BLOCK_Q consecutive tokens of one sequence and, for each, the GROUP query heads that share the KV head, so
that a key is loaded once for all of them and decode fills the matrix unit as far as the heads allow. Tiles are numbered
as if every sequence began a new one: tile (query_start_loc[b] // BLOCK_Q + b) is the first of sequence b, so
T // BLOCK_Q + B programs are enough and a binary search finds the sequence without a read on the host. Keys are
gathered position by position, so that the tile along the keys does not depend on the page size.

Source: Dao, "FlashAttention-2", algorithm 1; Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention", section 4.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import (
    WITHOUT_FP8,
    CompileCase,
    launch,
    next_power_of_2,
    supports_triton,
    why_not_dtype,
)
from vllm_triton.ops.paged_attention.op import paged_attention
from vllm_triton.ops.paged_attention.splits import (
    COMPILE_CASE,
    KEYS_PER_SPLIT,
    LN_2,
    merge_splits,
    select_num_splits,
)
from vllm_triton.ops.registry import Situation

# tl.dot takes no fewer rows or columns.
SMALLEST_TILE = 16
# From this many queries a sequence on average, tiles of 64 rows pay.
PREFILL_QUERIES = 8
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_sequence(query_start_loc_ptr, num_sequences, tile, BLOCK_Q: tl.constexpr):
    """The last sequence whose first tile is not after `tile`."""
    low = tile * 0
    high = low + num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        not_after = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= tile
        low = tl.where(not_after, middle, low)
        high = tl.where(not_after, high, middle - 1)
    return low


# Strides of the caches stay specialised: an engine has one value of each, and knowing that they are multiples of 16
# lets the compiler load keys in vectors.
@triton.jit(
    do_not_specialize=[
        "window",
        "num_sequences",
        "query_stride_t",
        "query_stride_h",
        "block_table_stride_b",
        "out_stride_t",
        "out_stride_h",
        "lse_stride_t",
        "partial_stride_s",
    ],
    do_not_specialize_on_alignment=["query_ptr", "block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "out_ptr"],
)
def _paged_attention_kernel(
    query_ptr,  # [T, H, D]
    key_cache_ptr,  # [P, S, G, D]
    value_cache_ptr,  # [P, S, G, D]
    block_table_ptr,  # [B, M]
    seq_lens_ptr,  # [B]
    query_start_loc_ptr,  # [B + 1]
    out_ptr,  # [T, H, D]
    sinks_ptr,  # [H] or None
    key_scale_ptr,  # [1] or [G], or None
    value_scale_ptr,
    lse_ptr,  # [T, H] or None
    partial_ptr,  # [SPLITS, T, H, D], None for one split
    partial_lse_ptr,  # [SPLITS, T, H]
    scale: tl.float32,
    softcap: tl.float32,
    window,
    num_sequences,
    query_stride_t,
    query_stride_h,
    key_stride_p,
    key_stride_s,
    key_stride_g,
    value_stride_p,
    value_stride_s,
    value_stride_g,
    block_table_stride_b,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    partial_stride_s,  # rows of D elements from split to split
    S: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[t, h] = sum_j softmax_j(scale * query[t, h] . key[j, h // GROUP]) value[j, h // GROUP], see the op.

    With several splits, program z sees part z of the keys and leaves its result and log2-sum-exp2 in partial, unless
    the keys are so few that the first program sees them all, and writes out.

    Source: Dao, "FlashAttention-2", algorithm 1.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = _find_sequence(query_start_loc_ptr, num_sequences, tile, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + sequence)
    query_len = tl.load(query_start_loc_ptr + sequence + 1) - query_start
    first_query = (tile - query_start // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    query_index = first_query + rows // GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (query_index < query_len)
    tokens = (query_start + query_index).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    tile_mask = row_mask[:, None] & (columns < D)[None, :]
    query_offsets = tokens * query_stride_t + heads * query_stride_h
    query = tl.load(query_ptr + query_offsets[:, None] + columns[None, :], mask=tile_mask, other=0.0)

    context = tl.load(seq_lens_ptr + sequence) - query_len
    positions = context + query_index
    key_start = tl.maximum(context + first_query - window + 1, 0) if HAS_WINDOW else 0
    key_end = context + (tl.minimum(first_query + BLOCK_Q, query_len) if IS_CAUSAL else query_len)
    if SPLITS > 1:
        partial_rows = tl.program_id(2).to(tl.int64) * partial_stride_s + tokens * (tl.num_programs(1) * GROUP) + heads
        in_use = tl.minimum(tl.maximum((key_end - key_start) // KEYS_PER_SPLIT, 1), SPLITS)
        if tl.program_id(2) >= in_use:
            tl.store(partial_lse_ptr + partial_rows, float("-inf"), mask=row_mask)
            return
        share = tl.cdiv(tl.cdiv(key_end - key_start, in_use), BLOCK_N) * BLOCK_N
        key_start += tl.program_id(2) * share
        key_end = tl.minimum(key_start + share, key_end)
    table_ptr = block_table_ptr + sequence.to(tl.int64) * block_table_stride_b

    score_scale = scale
    value_scale = 1.0
    if key_scale_ptr is not None:
        scale_head = kv_head if SCALE_PER_HEAD else 0
        score_scale *= tl.load(key_scale_ptr + scale_head)
        value_scale = tl.load(value_scale_ptr + scale_head)

    # A sink is a key that was seen before the first, with a value of zero. All logarithms are to the base 2.
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    if sinks_ptr is not None:
        is_first = SPLITS == 1 or tl.program_id(2) == 0
        if is_first:
            highest = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0) * LOG2_E
            mass += 1.0
    total = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(key_start, key_end, BLOCK_N):
        key_positions = start + tl.arange(0, BLOCK_N)
        key_mask = key_positions < key_end
        pages = tl.load(table_ptr + key_positions // S, mask=key_mask, other=0).to(tl.int64)
        slots = (key_positions % S).to(tl.int64)
        load_mask = key_mask[:, None] & (columns < D)[None, :]
        key_offsets = pages * key_stride_p + slots * key_stride_s + kv_head * key_stride_g
        key = tl.load(key_cache_ptr + key_offsets[:, None] + columns[None, :], mask=load_mask, other=0.0)
        value_offsets = pages * value_stride_p + slots * value_stride_s + kv_head * value_stride_g
        value = tl.load(value_cache_ptr + value_offsets[:, None] + columns[None, :], mask=load_mask, other=0.0)

        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), without softcap_logits' series near 0: of a score the absolute error counts.
        if HAS_SOFTCAP:
            doubled = scores * (score_scale * 2 * LOG2_E / softcap)
            scores = (softcap * LOG2_E) * (1 - 2 / (tl.exp2(doubled) + 1))
        else:
            scores = scores * (score_scale * LOG2_E)
        # Keys from key_end on come after every query that is stored, and what ends before ends with a tile.
        seen = key_positions[None, :] <= positions[:, None] if IS_CAUSAL else key_mask[None, :]
        if HAS_WINDOW:
            seen &= key_positions[None, :] > (positions - window)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A row whose window begins beyond this tile has seen nothing yet: -inf minus -inf must not become NaN.
        subtracted = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - subtracted[:, None])
        rescale = tl.exp2(highest - subtracted)
        mass = mass * rescale + tl.sum(weights, axis=1)
        total = total * rescale[:, None]
        total = tl.dot(weights.to(query.dtype), value.to(query.dtype), total, input_precision="ieee")
        highest = new_highest

    # A query that sees nothing has no mass, and rows of the tile that hold no query may have none.
    result = total * value_scale / tl.where(mass > 0, mass, 1.0)[:, None]
    lse = tl.where(mass > 0, highest + tl.log2(mass), float("-inf"))
    if SPLITS > 1:
        if in_use > 1:
            tl.store(partial_ptr + partial_rows[:, None] * D + columns[None, :], result, mask=tile_mask)
            tl.store(partial_lse_ptr + partial_rows, lse, mask=row_mask)
            return
        tl.store(partial_lse_ptr + partial_rows, float("-inf"), mask=row_mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + tokens * lse_stride_t + heads, lse * LN_2, mask=row_mask)
    out_offsets = tokens * out_stride_t + heads * out_stride_h
    tl.store(out_ptr + out_offsets[:, None] + columns[None, :], result, mask=tile_mask)


@dataclass(frozen=True)
class PagedAttentionConfig:
    block_q: int
    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


@functools.cache
def select_config(
    num_tokens: int, num_sequences: int, head_size: int, group: int, dtype: torch.dtype
) -> PagedAttentionConfig:
    """Tile sizes: two variants a model, one for mostly decode and one for mostly prefill."""
    prefill = num_tokens >= PREFILL_QUERIES * num_sequences
    block_m = max(64 if prefill else SMALLEST_TILE, next_power_of_2(group))
    block_d = max(next_power_of_2(head_size), SMALLEST_TILE)
    # Keys and values of two pipeline stages fit into 64 KiB of shared memory.
    bytes_per_key = 2 * 2 * block_d * dtype.itemsize
    block_n = min(max(65536 // bytes_per_key, SMALLEST_TILE), 64)
    return PagedAttentionConfig(
        block_m // group, block_m, block_n, block_d, num_warps=4 if block_m <= 64 else 8, num_stages=2
    )


@functools.cache
def select_cpu_config(num_tokens: int, num_sequences: int, head_size: int, group: int) -> PagedAttentionConfig:
    """Tile sizes: as many rows as heads share a KV head for decode, enough to be worth loading keys for prefill, where
    twice the keys halve what a tile costs beside its products.
    """
    prefill = num_tokens >= PREFILL_QUERIES * num_sequences
    block_m = max(64 if prefill else 1, next_power_of_2(group))
    block_d = max(next_power_of_2(head_size), SMALLEST_TILE)
    return PagedAttentionConfig(block_m // group, block_m, 128 if prefill else 64, block_d, num_warps=1, num_stages=1)


def _compile_case(
    num_tokens: int,
    head_size: int,
    group: int,
    dtype: torch.dtype,
    type_name: str,
    cache_type: str | None = None,
    splits: int = 1,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
) -> CompileCase:
    config = select_config(num_tokens, 16, head_size, group, dtype)
    pointers = {"query_ptr": type_name}
    pointers |= {f"{name}_ptr": cache_type or type_name for name in ("key_cache", "value_cache")}
    extras = {"sinks_ptr": sinks, "key_scale_ptr": cache_type, "value_scale_ptr": cache_type, "lse_ptr": False}
    extras |= {"partial_ptr": splits > 1, "partial_lse_ptr": splits > 1}
    pointers |= {name: "*fp32" for name, is_given in extras.items() if is_given}
    tables = {f"{name}_ptr": "*i32" for name in ("block_table", "seq_lens", "query_start_loc")}
    numbers = ["window", "num_sequences", "query_stride_t", "query_stride_h"]
    numbers += [f"{cache}_stride_{axis}" for cache in ("key", "value") for axis in "psg"]
    numbers += ["block_table_stride_b", "out_stride_t", "out_stride_h", "lse_stride_t", "partial_stride_s"]
    return CompileCase(
        _paged_attention_kernel,
        pointers | tables | {"out_ptr": type_name, "scale": "fp32", "softcap": "fp32"} | dict.fromkeys(numbers, "i32"),
        {name: None for name, is_given in extras.items() if not is_given}
        | {
            "S": 16,
            "D": head_size,
            "GROUP": group,
            "HAS_WINDOW": window,
            "HAS_SOFTCAP": softcap,
            "IS_CAUSAL": True,
            "SCALE_PER_HEAD": True,
            "SPLITS": splits,
            "BLOCK_Q": config.block_q,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": config.block_d,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


COMPILE_CASES = [
    _compile_case(16, 64, 3, torch.bfloat16, "*bf16"),
    _compile_case(2048, 128, 4, torch.bfloat16, "*bf16"),
    _compile_case(2048, 96, 1, torch.float32, "*fp32"),
    _compile_case(2048, 64, 8, torch.bfloat16, "*bf16", window=True, sinks=True),
    _compile_case(2048, 256, 2, torch.bfloat16, "*bf16", window=True, softcap=True),
    _compile_case(16, 128, 4, torch.bfloat16, "*bf16", splits=16),
    replace(_compile_case(16, 128, 4, torch.bfloat16, "*bf16", cache_type="*fp8e4nv"), without=WITHOUT_FP8),
    _compile_case(16, 128, 4, torch.bfloat16, "*bf16", cache_type="*i8"),
    COMPILE_CASE,
]


def supports_cache(situation: Situation) -> str | None:
    """The reason why Triton does not read or write this cache here, or None."""
    return why_not_dtype(situation.kv_cache_dtype, situation.device) or supports_triton(situation)


@paged_attention.impl("triton", supports=supports_cache, compile_cases=COMPILE_CASES)
def launch_paged_attention(
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
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, num_sequences = key_cache.shape[2], seq_lens.shape[0]
    if num_tokens == 0 or num_sequences == 0:
        return
    group = num_heads // num_kv_heads
    if query.is_cpu:
        config = select_cpu_config(num_tokens, num_sequences, head_size, group)
    else:
        config = select_config(num_tokens, num_sequences, head_size, group, query.dtype)
    grid = (num_tokens // config.block_q + num_sequences, num_kv_heads)
    splits, partial, partial_lse = 1, None, None
    if num_tokens < PREFILL_QUERIES * num_sequences:
        # The table may be cut to the texts that are there; how far apart its rows lie says what it may hold.
        most_keys = block_table.stride(0) * key_cache.shape[1]
        splits = select_num_splits(num_sequences * num_kv_heads, most_keys, query.device)
    if splits > 1:
        partial = torch.empty((splits, *query.shape), dtype=torch.float32, device=query.device)
        partial_lse = torch.empty((splits, num_tokens, num_heads), dtype=torch.float32, device=query.device)
    caches = (*key_cache.stride()[:3], *value_cache.stride()[:3])
    strides = (*query.stride()[:2], *caches, block_table.stride(0), *out.stride()[:2])
    strides += (0 if lse is None else lse.stride(0), num_tokens * num_heads)
    per_head = key_scale is not None and key_scale.shape[0] > 1
    flags = (window > 0, softcap > 0, is_causal, per_head, splits)
    tiles = (config.block_q, config.block_m, config.block_n, config.block_d)
    launch(
        _paged_attention_kernel,
        grid if splits == 1 else (*grid, splits),
        (
            *(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, out),
            *(sinks, key_scale, value_scale, lse, partial, partial_lse),
        ),
        (scale, softcap, window, num_sequences, *strides),
        (key_cache.shape[1], head_size, group, *flags, *tiles),
        config.num_warps,
        config.num_stages,
    )
    if partial is not None and partial_lse is not None:
        merge_splits(partial, partial_lse, query_start_loc, out, lse)
