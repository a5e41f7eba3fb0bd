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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, next_power_of_2, supports_triton
from vllm_triton.ops.paged_attention.op import paged_attention

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
    scale: tl.float32,
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
    S: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[t, h] = sum_j softmax_j(scale * query[t, h] . key[j, h // GROUP]) value[j, h // GROUP], see the op.

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
    key_end = context + tl.minimum(first_query + BLOCK_Q, query_len)
    table_ptr = block_table_ptr + sequence.to(tl.int64) * block_table_stride_b

    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
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

        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        # Keys from key_end on come after every query that is stored.
        seen = key_positions[None, :] <= positions[:, None]
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
        total = tl.dot(weights.to(value.dtype), value, total, input_precision="ieee")
        highest = new_highest

    # Rows of the tile that hold no query may have no mass; they are not stored.
    result = total / tl.where(mass > 0, mass, 1.0)[:, None]
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
    num_tokens: int, head_size: int, group: int, dtype: torch.dtype, type_name: str, window: bool = False
) -> CompileCase:
    config = select_config(num_tokens, 16, head_size, group, dtype)
    pointers = {f"{name}_ptr": type_name for name in ("query", "key_cache", "value_cache")}
    tables = {f"{name}_ptr": "*i32" for name in ("block_table", "seq_lens", "query_start_loc")}
    numbers = ["window", "num_sequences", "query_stride_t", "query_stride_h"]
    numbers += [f"{cache}_stride_{axis}" for cache in ("key", "value") for axis in "psg"]
    numbers += ["block_table_stride_b", "out_stride_t", "out_stride_h"]
    return CompileCase(
        _paged_attention_kernel,
        pointers | tables | {"out_ptr": type_name, "scale": "fp32"} | dict.fromkeys(numbers, "i32"),
        {
            "S": 16,
            "D": head_size,
            "GROUP": group,
            "HAS_WINDOW": window,
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
    _compile_case(2048, 128, 4, torch.bfloat16, "*bf16", window=True),
]


@paged_attention.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
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
    caches = (*key_cache.stride()[:3], *value_cache.stride()[:3])
    strides = (*query.stride()[:2], *caches, block_table.stride(0), *out.stride()[:2])
    tiles = (config.block_q, config.block_m, config.block_n, config.block_d)
    launch(
        _paged_attention_kernel,
        (num_tokens // config.block_q + num_sequences, num_kv_heads),
        (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, out),
        (scale, window, num_sequences, *strides),
        (key_cache.shape[1], head_size, group, window > 0, *tiles),
        config.num_warps,
        config.num_stages,
    )
