"""Writing keys and values into the paged cache, one program a token. Nothing is computed: no accumulation.

    key_cache[slot // S, slot % S] = key[t];  value_cache likewise

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, block_size, launch, rows_aligned, supports_triton
from vllm_triton.ops.reshape_and_cache.op import reshape_and_cache

# Elements copied at a time; a token's heads beyond it are copied in a loop.
LARGEST_BLOCK = 2048
_STRIDES = (
    "key_stride_t",
    "key_stride_g",
    "value_stride_t",
    "value_stride_g",
    "key_cache_stride_p",
    "key_cache_stride_s",
    "key_cache_stride_g",
    "value_cache_stride_p",
    "value_cache_stride_s",
    "value_cache_stride_g",
)


@triton.jit
def _copy_heads(
    from_ptr,
    to_ptr,
    from_stride_g,
    to_stride_g,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
):
    """Copies [G, D] elements."""
    for start in range(0, G * D, BLOCK):
        elements = start + tl.arange(0, BLOCK)
        heads = (elements // D).to(tl.int64)
        from_offsets = heads * from_stride_g
        to_offsets = heads * to_stride_g
        if ROWS_ALIGNED:
            from_offsets = tl.multiple_of(from_offsets, 16)
            to_offsets = tl.multiple_of(to_offsets, 16)
        mask = elements < G * D
        copied = tl.load(from_ptr + from_offsets + elements % D, mask=mask, other=0.0)
        tl.store(to_ptr + to_offsets + elements % D, copied, mask=mask)


@triton.jit(do_not_specialize=list(_STRIDES))
def _reshape_and_cache_kernel(
    key_ptr,  # [T, G, D]
    value_ptr,  # [T, G, D]
    key_cache_ptr,  # [P, S, G, D]
    value_cache_ptr,  # [P, S, G, D]
    slot_mapping_ptr,  # [T]
    key_stride_t,
    key_stride_g,
    value_stride_t,
    value_stride_g,
    key_cache_stride_p,
    key_cache_stride_s,
    key_cache_stride_g,
    value_cache_stride_p,
    value_cache_stride_s,
    value_cache_stride_g,
    S: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:  # padding
        return
    page = slot // S
    within = slot % S
    key_offset = token * key_stride_t
    value_offset = token * value_stride_t
    key_cell = page * key_cache_stride_p + within * key_cache_stride_s
    value_cell = page * value_cache_stride_p + within * value_cache_stride_s
    if ROWS_ALIGNED:
        key_offset = tl.multiple_of(key_offset, 16)
        value_offset = tl.multiple_of(value_offset, 16)
        key_cell = tl.multiple_of(key_cell, 16)
        value_cell = tl.multiple_of(value_cell, 16)
    _copy_heads(
        key_ptr + key_offset, key_cache_ptr + key_cell, key_stride_g, key_cache_stride_g,
        G, D, BLOCK, ROWS_ALIGNED,
    )  # fmt: skip
    _copy_heads(
        value_ptr + value_offset, value_cache_ptr + value_cell, value_stride_g, value_cache_stride_g,
        G, D, BLOCK, ROWS_ALIGNED,
    )  # fmt: skip


@dataclass(frozen=True)
class ReshapeAndCacheConfig:
    block: int
    num_warps: int = 4


@functools.cache
def select_config(num_elements: int) -> ReshapeAndCacheConfig:
    return ReshapeAndCacheConfig(block_size(num_elements, LARGEST_BLOCK))


COMPILE_CASES = [
    CompileCase(
        _reshape_and_cache_kernel,
        {
            "key_ptr": "*bf16",
            "value_ptr": "*bf16",
            "key_cache_ptr": "*bf16",
            "value_cache_ptr": "*bf16",
            "slot_mapping_ptr": "*i64",
        }
        | dict.fromkeys(_STRIDES, "i32"),
        {"S": 16, "G": 8, "D": 128, "BLOCK": 1024, "ROWS_ALIGNED": True},
    )
]


@reshape_and_cache.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens, num_kv_heads, head_size = key.shape
    if num_tokens == 0:
        return
    config = select_config(num_kv_heads * head_size)
    aligned = rows_aligned(key, value, key_cache, value_cache)
    launch(
        _reshape_and_cache_kernel,
        (num_tokens,),
        (key, value, key_cache, value_cache, slot_mapping),
        (*key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]),
        (key_cache.shape[1], num_kv_heads, head_size, config.block, aligned),
        config.num_warps,
    )
