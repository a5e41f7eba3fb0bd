"""Dense projection of small numbers, one program for each tile of the result.

    y[t, n] = sum_b a_scale[t, b] * weight_scale[n // 128, b] * (sum_k a[t, k] * weight[n, k]) + bias[n]

Products are summed as they are: of int8 in int32, exactly, of fp8 in float32. Scales of whole rows are applied to a
tile's sums at the end; scales of blocks to each block's, which are then summed in float32.

A Hopper GPU sums fp8 with few bits; what it has summed over BLOCK_K columns is added to the tile's sums in float32.

Source: Xiao et al., "SmoothQuant", section 3; DeepSeek-AI, "DeepSeek-V3 Technical Report", sections 3.3.2 and 3.5.2.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import (
    WITHOUT_FP8,
    CompileCase,
    ceil_div,
    launch,
    next_power_of_2,
    rows_aligned,
    supports_weights,
)
from vllm_triton.ops.linear.kernel import GROUP_T, tile_of_program
from vllm_triton.ops.scaled_mm.op import has_blocks, scaled_mm
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK

_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit(do_not_specialize=["T", "a_stride_t", "weight_stride_n", "a_scale_stride_t"])
def _scaled_mm_kernel(
    a_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    a_scale_ptr,  # [T, Q], or [1] with a stride of 0
    weight_scale_ptr,  # [N], [1] with a stride of 0, or of blocks [ceil(N / 128), Q]
    bias_ptr,  # [N], or None
    out_ptr,  # [T, N], contiguous
    T,
    a_stride_t,
    weight_stride_n,
    a_scale_stride_t,
    weight_scale_stride_n,
    N,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,  # with blocks at most 128
    BLOCK_K: tl.constexpr,  # likewise
    GROUP_T: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
):
    tile_t, tile_n = tile_of_program(tl.program_id(0), T, N, BLOCK_T, BLOCK_N, GROUP_T)
    rows = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_offsets = rows * a_stride_t
    weight_offsets = columns * weight_stride_n
    if ROWS_ALIGNED:
        a_offsets = tl.multiple_of(a_offsets, 16)
        weight_offsets = tl.multiple_of(weight_offsets, 16)
    lanes = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + a_offsets[:, None] + lanes[None, :]  # [BLOCK_T, BLOCK_K]
    weight_ptrs = weight_ptr + weight_offsets[None, :] + lanes[:, None]  # [BLOCK_K, BLOCK_N]
    a_scale_ptrs = a_scale_ptr + rows * a_scale_stride_t
    SUM: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32 if HAS_BLOCKS else SUM)
    for start in range(0, K, BLOCK_K):
        inside = lanes < K - start
        a = tl.load(a_ptrs + start, mask=(rows[:, None] < T) & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=(columns[None, :] < N) & inside[:, None], other=0.0)
        if HAS_BLOCKS:
            block = start // _SCALE_BLOCK
            weight_row = tile_n.to(tl.int64) * BLOCK_N // _SCALE_BLOCK
            scale = tl.load(a_scale_ptrs + block, mask=rows < T, other=0.0)
            scale *= tl.load(weight_scale_ptr + weight_row * weight_scale_stride_n + block)
            total += tl.dot(a, weight, out_dtype=SUM, max_num_imprecise_acc=BLOCK_K).to(tl.float32) * scale[:, None]
        else:
            total = tl.dot(a, weight, total, out_dtype=SUM, max_num_imprecise_acc=BLOCK_K)
    out = total.to(tl.float32)
    if not HAS_BLOCKS:
        a_scale = tl.load(a_scale_ptrs, mask=rows < T, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + columns * weight_scale_stride_n, mask=columns < N, other=0.0)
        out = out * a_scale[:, None] * weight_scale[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_mask = (rows[:, None] < T) & (columns[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], out, mask=out_mask)


@dataclass(frozen=True)
class ScaledMmConfig:
    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@functools.cache
def select_config(num_tokens: int) -> ScaledMmConfig:
    """Tiles as those of `linear`, as deep as a block of scales, within 64 KiB of shared memory.

    Args:
        num_tokens: rows of a.
    """
    if num_tokens <= 16:  # tl.dot has no smaller tile
        return ScaledMmConfig(16, 32, 128, num_warps=4, num_stages=4)
    if num_tokens <= 64:
        return ScaledMmConfig(64, 64, 128, num_warps=4, num_stages=3)
    return ScaledMmConfig(128, 128, 128, num_warps=8, num_stages=2)


@functools.cache
def select_cpu_config(num_tokens: int, depth: int, blocks: bool) -> ScaledMmConfig:
    """Tiles as those of `linear`, no deeper than a block of scales.

    Few tokens take 64 columns, not 16: a row of int8 is so short that a program's start counts (1 token, N = 3072,
    K = 576, one core of an AMD EPYC: 50 us and 66).

    Args:
        num_tokens: rows of a.
        depth: columns of a.
        blocks: whether scales are of blocks.
    """
    block_t = min(next_power_of_2(num_tokens), 256)
    deepest = SCALE_BLOCK if blocks else 4096 if block_t <= 32 else 1024
    block_k = min(max(next_power_of_2(depth), 16), deepest)
    block_n = 64 if block_t <= 64 else 128
    return ScaledMmConfig(block_t, block_n, block_k, num_warps=1, num_stages=1)


_NUMBERS = ("T", "a_stride_t", "weight_stride_n", "a_scale_stride_t", "weight_scale_stride_n", "N", "K")


def _compile_case(
    operands: str, num_tokens: int, has_bias: bool, blocks: bool, without: Mapping[str, str] | None = None
) -> CompileCase:
    config = select_config(num_tokens)
    pointers = {"a_ptr": operands, "weight_ptr": operands, "a_scale_ptr": "*fp32", "weight_scale_ptr": "*fp32"}
    return CompileCase(
        _scaled_mm_kernel,
        pointers | {"out_ptr": "*bf16"} | ({"bias_ptr": "*bf16"} if has_bias else {}) | dict.fromkeys(_NUMBERS, "i32"),
        {
            "BLOCK_T": config.block_t,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_T": GROUP_T,
            "ROWS_ALIGNED": True,
            "HAS_BLOCKS": blocks,
        }
        | ({} if has_bias else {"bias_ptr": None}),
        config.num_warps,
        config.num_stages,
        without or {},
    )


def _compile_cases(operands: str, without: Mapping[str, str] | None = None) -> list[CompileCase]:
    kinds = ((1, False, False), (64, True, True), (1024, True, False), (1024, False, True))
    return [_compile_case(operands, *kind, without) for kind in kinds]


COMPILE_CASES = [*_compile_cases("*i8"), *_compile_cases("*fp8e4nv", WITHOUT_FP8)]


@scaled_mm.impl("triton", supports=supports_weights, compile_cases=COMPILE_CASES)
def launch_scaled_mm(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    num_tokens, depth = a.shape
    num_columns = weight.shape[0]
    out = a.new_empty(num_tokens, num_columns, dtype=out_dtype)
    if out.numel() == 0:
        return out
    blocks = has_blocks(weight, weight_scale)
    config = select_cpu_config(num_tokens, depth, blocks) if a.is_cpu else select_config(num_tokens)
    grid = (ceil_div(num_tokens, config.block_t) * ceil_div(num_columns, config.block_n),)
    # One scale is that of every row.
    scale_strides = [scale.stride(0) if scale.shape[0] > 1 else 0 for scale in (a_scale, weight_scale)]
    launch(
        _scaled_mm_kernel,
        grid,
        (a, weight, a_scale, weight_scale, bias, out),
        (num_tokens, a.stride(0), weight.stride(0), *scale_strides, num_columns, depth),
        (config.block_t, config.block_n, config.block_k, GROUP_T, rows_aligned(a, weight), blocks),
        config.num_warps,
        config.num_stages,
    )
    return out
