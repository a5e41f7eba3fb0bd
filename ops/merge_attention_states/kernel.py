"""Merging two results of attention, one program for some heads of a token; float32 between load and store.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax".
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, ceil_div, launch, next_power_of_2, supports_triton
from vllm_triton.ops.merge_attention_states.op import merge_attention_states

# Elements of a program: 8 for each of 128 threads.
LARGEST_TILE = 1024
_STRIDES = [f"{name}_stride_{axis}" for name in ("out", "first", "second") for axis in "th"]
_STRIDES += [f"{name}_stride_t" for name in ("first_lse", "second_lse", "lse")]


@triton.jit(do_not_specialize=list(_STRIDES))
def _merge_attention_states_kernel(
    out_ptr,  # [T, H, D]
    first_ptr,
    first_lse_ptr,  # [T, H]
    second_ptr,
    second_lse_ptr,
    lse_ptr,  # [T, H] or None
    out_stride_t,
    out_stride_h,
    first_stride_t,
    first_stride_h,
    second_stride_t,
    second_stride_h,
    first_lse_stride_t,
    second_lse_stride_t,
    lse_stride_t,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = sum of the parts weighted with e^(lse of the part - lse of both).

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax".
    """
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    is_head = heads < H
    tile_mask = is_head[:, None] & (columns < D)[None, :]
    nothing = float("-inf")
    first_lse = tl.load(first_lse_ptr + token * first_lse_stride_t + heads, mask=is_head, other=nothing)
    second_lse = tl.load(second_lse_ptr + token * second_lse_stride_t + heads, mask=is_head, other=nothing)
    highest = tl.maximum(first_lse, second_lse)
    subtracted = tl.where(highest == nothing, 0.0, highest)
    first_weight, second_weight = tl.exp(first_lse - subtracted), tl.exp(second_lse - subtracted)
    mass = first_weight + second_weight
    first_mask = tile_mask & (first_lse > nothing)[:, None]
    second_mask = tile_mask & (second_lse > nothing)[:, None]
    first_offsets = token * first_stride_t + heads[:, None] * first_stride_h + columns[None, :]
    second_offsets = token * second_stride_t + heads[:, None] * second_stride_h + columns[None, :]
    first = tl.load(first_ptr + first_offsets, mask=first_mask, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + second_offsets, mask=second_mask, other=0.0).to(tl.float32)
    divisor = tl.where(mass > 0, mass, 1.0)
    merged = first * (first_weight / divisor)[:, None] + second * (second_weight / divisor)[:, None]
    out_offsets = token * out_stride_t + heads[:, None] * out_stride_h + columns[None, :]
    tl.store(out_ptr + out_offsets, merged, mask=tile_mask)
    if lse_ptr is not None:
        lse = tl.where(mass > 0, subtracted + tl.log(mass), nothing)
        tl.store(lse_ptr + token * lse_stride_t + heads, lse, mask=is_head)


@dataclass(frozen=True)
class MergeConfig:
    block_h: int
    block_d: int
    num_warps: int = 4


@functools.cache
def select_config(num_heads: int, head_size: int) -> MergeConfig:
    block_d = next_power_of_2(head_size)
    return MergeConfig(max(min(LARGEST_TILE // block_d, next_power_of_2(num_heads)), 1), block_d)


COMPILE_CASES = [
    CompileCase(
        _merge_attention_states_kernel,
        {"out_ptr": "*bf16", "first_ptr": "*bf16", "second_ptr": "*bf16"}
        | {"first_lse_ptr": "*fp32", "second_lse_ptr": "*fp32", "lse_ptr": "*fp32"}
        | dict.fromkeys(_STRIDES, "i32"),
        {"H": 32, "D": 128, "BLOCK_H": 8, "BLOCK_D": 128},
    )
]


@merge_attention_states.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_merge_attention_states(
    out: torch.Tensor,
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    num_tokens, num_heads, head_size = out.shape
    if out.numel() == 0:
        return
    config = select_config(num_heads, head_size)
    strides = (*out.stride()[:2], *first.stride()[:2], *second.stride()[:2])
    strides += (first_lse.stride(0), second_lse.stride(0), 0 if lse is None else lse.stride(0))
    launch(
        _merge_attention_states_kernel,
        (num_tokens, ceil_div(num_heads, config.block_h)),
        (out, first, first_lse, second, second_lse, lse),
        strides,
        (num_heads, head_size, config.block_h, config.block_d),
        config.num_warps,
    )
