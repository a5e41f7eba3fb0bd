"""Writing keys and values into the paged cache, one program a token, for a quantized cache over their scale in float32.

    key_cache[slot // S, slot % S] = key[t];  value_cache likewise

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import WITHOUT_FP8, CompileCase, block_size, launch, rows_aligned
from vllm_triton.ops.paged_attention.kernel import supports_cache
from vllm_triton.ops.reshape_and_cache.op import reshape_and_cache

# Elements copied at a time; a token's heads beyond it are copied in a loop.
LARGEST_BLOCK = 2048
ROUNDER = tl.constexpr(1.5 * 2**23)
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
    scale_ptr,
    from_stride_g,
    to_stride_g,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
):
    """Copies [G, D] elements, or quantizes them where there is a scale."""
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
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + heads, mask=mask, other=1.0) if SCALE_PER_HEAD else tl.load(scale_ptr)
            copied = tl.div_rn(copied.to(tl.float32), tl.broadcast_to(scale, [BLOCK]))
            LARGEST: tl.constexpr = 127.0 if to_ptr.dtype.element_ty == tl.int8 else 448.0
            copied = tl.minimum(tl.maximum(copied, -LARGEST), LARGEST)
            if to_ptr.dtype.element_ty == tl.int8:
                # Adding and taking away 1.5 * 2^23 leaves no bits for a fraction: rounded, ties to even.
                copied = (copied + ROUNDER) - ROUNDER
        tl.store(to_ptr + to_offsets + elements % D, copied.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=list(_STRIDES))
def _reshape_and_cache_kernel(
    key_ptr,  # [T, G, D]
    value_ptr,  # [T, G, D]
    key_cache_ptr,  # [P, S, G, D]
    value_cache_ptr,  # [P, S, G, D]
    slot_mapping_ptr,  # [T]
    key_scale_ptr,  # [1] or [G], or None
    value_scale_ptr,
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
    SCALE_PER_HEAD: tl.constexpr,
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
        key_ptr + key_offset, key_cache_ptr + key_cell, key_scale_ptr, key_stride_g, key_cache_stride_g,
        G, D, BLOCK, ROWS_ALIGNED, SCALE_PER_HEAD,
    )  # fmt: skip
    _copy_heads(
        value_ptr + value_offset, value_cache_ptr + value_cell, value_scale_ptr, value_stride_g, value_cache_stride_g,
        G, D, BLOCK, ROWS_ALIGNED, SCALE_PER_HEAD,
    )  # fmt: skip


@dataclass(frozen=True)
class ReshapeAndCacheConfig:
    block: int
    num_warps: int = 4


@functools.cache
def select_config(num_elements: int) -> ReshapeAndCacheConfig:
    return ReshapeAndCacheConfig(block_size(num_elements, LARGEST_BLOCK))


def _compile_case(cache_type: str, without: Mapping[str, str] | None = None) -> CompileCase:
    pointers = {"key_ptr": "*bf16", "value_ptr": "*bf16", "key_cache_ptr": cache_type, "value_cache_ptr": cache_type}
    scales = ("key_scale_ptr", "value_scale_ptr")
    is_quantized = cache_type != "*bf16"
    return CompileCase(
        _reshape_and_cache_kernel,
        pointers
        | {"slot_mapping_ptr": "*i64"}
        | (dict.fromkeys(scales, "*fp32") if is_quantized else {})
        | dict.fromkeys(_STRIDES, "i32"),
        {"S": 16, "G": 8, "D": 128, "BLOCK": 1024, "ROWS_ALIGNED": True, "SCALE_PER_HEAD": is_quantized}
        | ({} if is_quantized else dict.fromkeys(scales)),
        without=without or {},
    )


COMPILE_CASES = [_compile_case("*bf16"), _compile_case("*i8"), _compile_case("*fp8e4nv", WITHOUT_FP8)]


@reshape_and_cache.impl("triton", supports=supports_cache, compile_cases=COMPILE_CASES)
def launch_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    num_tokens, num_kv_heads, head_size = key.shape
    if num_tokens == 0:
        return
    config = select_config(num_kv_heads * head_size)
    aligned = rows_aligned(key, value, key_cache, value_cache)
    per_head = key_scale is not None and key_scale.shape[0] > 1
    launch(
        _reshape_and_cache_kernel,
        (num_tokens,),
        (key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale),
        (*key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]),
        (key_cache.shape[1], num_kv_heads, head_size, config.block, aligned, per_head),
        config.num_warps,
    )
