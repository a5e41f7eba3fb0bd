"""Products by 4-bit weights, unpacked a block of 32 inputs at a time, never as a whole.

A block's values are small integers, exact in every dtype: they are multiplied and summed as such in float32, and the
block's scale is applied to its sum. The minimum times the sum of the block's inputs comes on top:

    y[t, n] = sum_b scale[n, b] * (sum_k q[n, k] * x[t, k]) + minimum[n, b] * (sum_k x[t, k])

One token takes a kernel of its own, bound by reading the weight: lanes are rows of it, and each input is one number for
all of them. It does not convert q but puts its bits into the mantissa of a number from 1 to 2, which is 1 + q/16.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, block_size, ceil_div, launch, rows_aligned, supports_triton
from vllm_triton.ops.w4a16_mm.op import w4a16_mm

_STRIDES = [
    "quants_stride_j",
    "quants_stride_w",
    "scales_stride_j",
    "scales_stride_q",
    "minima_stride_j",
    "minima_stride_q",
]


@triton.jit
def _along_groups(groups, stride_j, ALIGNED: tl.constexpr):
    """Offsets of groups of rows."""
    offsets = groups * stride_j
    if ALIGNED:
        offsets = tl.multiple_of(offsets, 16)
    return offsets


@triton.jit(do_not_specialize=["Q", *_STRIDES])
def _one_token_kernel(
    x_ptr,  # [1, 32*Q]
    quants_ptr,  # [J, 4*Q, 16]
    scales_ptr,  # [J, Q, 16]
    minima_ptr,  # [J, Q, 16]
    out_ptr,  # [1, 16*J], contiguous
    quants_stride_j,
    quants_stride_w,
    scales_stride_j,
    scales_stride_q,
    minima_stride_j,
    minima_stride_q,
    Q,
    BLOCK_J: tl.constexpr,  # divides J
    ALIGNED: tl.constexpr,
):
    groups = tl.program_id(0).to(tl.int64) * BLOCK_J + tl.arange(0, BLOCK_J)
    rows = tl.arange(0, 16)
    value = tl.arange(0, 8)[None, None, :, None]  # of a word
    words = (tl.arange(0, 4) * quants_stride_w)[None, :, None]
    quants_ptrs = quants_ptr + _along_groups(groups, quants_stride_j, ALIGNED)[:, None, None] + words + rows
    scales_ptrs = scales_ptr + _along_groups(groups, scales_stride_j, ALIGNED)[:, None] + rows
    minima_ptrs = minima_ptr + _along_groups(groups, minima_stride_j, ALIGNED)[:, None] + rows
    total = tl.zeros([BLOCK_J, 16], dtype=tl.float32)
    for block in range(Q):
        x = tl.load(x_ptr + block * 32 + tl.arange(0, 32)).to(tl.float32)
        quants = tl.load(quants_ptrs + block * 4 * quants_stride_w)[:, :, None, :]  # [BLOCK_J, 4, 1, 16]
        # Bits 4*value and up become bits 19 and up, the highest of the mantissa.
        quants = tl.where(value < 5, quants << (19 - 4 * value), quants >> (4 * value - 19))
        one_and_q = ((quants & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)  # [BLOCK_J, 4, 8, 16]
        product = tl.sum(tl.sum(one_and_q * tl.reshape(x, [1, 4, 8, 1]), axis=2), axis=1)  # [BLOCK_J, 16]
        x_sum = tl.sum(x)
        scale = tl.load(scales_ptrs + block * scales_stride_q).to(tl.float32)
        minimum = tl.load(minima_ptrs + block * minima_stride_q).to(tl.float32)
        total += (product - x_sum) * (16 * scale) + minimum * x_sum
    tl.store(out_ptr + groups[:, None] * 16 + rows, total)


@triton.jit(do_not_specialize=["T", "J", "Q", "x_stride_t", *_STRIDES])
def _tile_kernel(
    x_ptr,  # [T, 32*Q]
    quants_ptr,  # [J, 4*Q, 16]
    scales_ptr,  # [J, Q, 16]
    minima_ptr,  # [J, Q, 16]
    out_ptr,  # [T, 16*J], contiguous
    T,
    x_stride_t,
    quants_stride_j,
    quants_stride_w,
    scales_stride_j,
    scales_stride_q,
    minima_stride_j,
    minima_stride_q,
    J,
    Q,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, 16 * BLOCK_J)
    groups = tl.program_id(0).to(tl.int64) * BLOCK_J + columns // 16
    rows = columns % 16
    inside = groups < J
    shifts = (4 * tl.arange(0, 8))[None, :, None]
    words = (tl.arange(0, 4) * quants_stride_w)[:, None]
    x_ptrs = x_ptr + (tokens * x_stride_t)[:, None] + tl.arange(0, 32)
    quants_ptrs = quants_ptr + (_along_groups(groups, quants_stride_j, ALIGNED) + rows)[None, :] + words
    scales_ptrs = scales_ptr + _along_groups(groups, scales_stride_j, ALIGNED) + rows
    minima_ptrs = minima_ptr + _along_groups(groups, minima_stride_j, ALIGNED) + rows
    total = tl.zeros([BLOCK_T, 16 * BLOCK_J], dtype=tl.float32)
    for block in range(Q):
        x = tl.load(x_ptrs + block * 32, mask=(tokens < T)[:, None], other=0.0)
        quants = tl.load(quants_ptrs + block * 4 * quants_stride_w, mask=inside[None, :], other=0)
        quants = tl.reshape((quants[:, None, :] >> shifts) & 15, [32, 16 * BLOCK_J])
        product = tl.dot(x, quants.to(x.dtype), input_precision="ieee")
        x_sum = tl.sum(x.to(tl.float32), axis=1)
        scale = tl.load(scales_ptrs + block * scales_stride_q, mask=inside, other=0.0).to(tl.float32)
        minimum = tl.load(minima_ptrs + block * minima_stride_q, mask=inside, other=0.0).to(tl.float32)
        total += product * scale[None, :] + x_sum[:, None] * minimum[None, :]
    out_ptrs = out_ptr + (tokens * (16 * J))[:, None] + groups * 16 + rows
    tl.store(out_ptrs, total, mask=(tokens < T)[:, None] & inside[None, :])


@dataclass(frozen=True)
class W4A16Config:
    """block_t: tokens of a tile, 1 for the kernel of one token. block_j: groups of 16 rows."""

    block_t: int
    block_j: int
    num_warps: int = 4
    num_stages: int = 2


@functools.cache
def select_config(num_tokens: int, num_groups: int) -> W4A16Config:
    """One token: groups that share the work on x, without a rest. More: tiles of 64 columns.

    Args:
        num_tokens: rows of x.
        num_groups: groups of 16 rows of the weight.
    """
    if num_tokens == 1:
        return W4A16Config(1, math.gcd(num_groups, 4))
    return W4A16Config(max(block_size(num_tokens, 64), 16), 4)


_SIGNATURE = {
    "x_ptr": "*bf16",
    "quants_ptr": "*i32",
    "scales_ptr": "*fp16",
    "minima_ptr": "*fp16",
    "out_ptr": "*bf16",
} | dict.fromkeys(["Q", *_STRIDES], "i32")
_CONSTANTS = {"BLOCK_J": 4, "ALIGNED": True}

COMPILE_CASES = [
    CompileCase(_one_token_kernel, _SIGNATURE, _CONSTANTS, num_warps=4, num_stages=2),
    CompileCase(
        _tile_kernel,
        _SIGNATURE | {"T": "i32", "x_stride_t": "i32", "J": "i32"},
        _CONSTANTS | {"BLOCK_T": 16},
        num_warps=4,
        num_stages=2,
    ),
]


@w4a16_mm.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_w4a16_mm(x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    num_tokens = x.shape[0]
    num_groups, num_blocks, _ = scales.shape
    out = x.new_empty(num_tokens, 16 * num_groups)
    if out.numel() == 0:
        return out
    config = select_config(num_tokens, num_groups)
    grid = (ceil_div(num_groups, config.block_j), ceil_div(num_tokens, config.block_t))
    tensors = (x, quants, scales, minima, out)
    strides = (*quants.stride()[:2], *scales.stride()[:2], *minima.stride()[:2])
    constants = (config.block_j, rows_aligned(quants, scales, minima))
    if num_tokens == 1:
        launch(_one_token_kernel, grid, tensors, (*strides, num_blocks), constants, config.num_warps, config.num_stages)
    else:
        numbers = (num_tokens, x.stride(0), *strides, num_groups, num_blocks)
        tiles = (config.block_t, *constants)
        launch(_tile_kernel, grid, tensors, numbers, tiles, config.num_warps, config.num_stages)
    return out
