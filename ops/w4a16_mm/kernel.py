"""Products by 4-bit weights, unpacked a few blocks of 32 inputs at a time, never as a whole.

A few tokens take a kernel of their own, bound by reading the weight: lanes are rows of it, and each input is one number
for all of them. A value is not shifted down: it is taken as a number where it stands in its word, and its input is
scaled by that power of two instead, which is exact. A group's values are summed as integers, and its zero and its scale
are applied to the sum:

    y[t, n] = sum_g scale[n, g] * ((sum_k q[n, k] * x[t, k]) - zero[n, g] * (sum_k x[t, k]))

More tokens take the weight as a dense product does: a tile of it is unpacked into the dtype of x and multiplied. That
its scale is applied there, and not to the sums of each group, also lets a tile hold several groups or a part of one.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, ceil_div, launch, next_power_of_2, rows_aligned, supports_triton
from vllm_triton.ops.w4a16_mm.layout import MIDDLE
from vllm_triton.ops.w4a16_mm.op import w4a16_mm

_MIDDLE = tl.constexpr(MIDDLE)
_STRIDES = [
    "quants_stride_j",
    "quants_stride_w",
    "scales_stride_j",
    "scales_stride_s",
    "zeros_stride_j",
    "zeros_stride_s",
]


@triton.jit
def _along_groups(groups, stride_j, ALIGNED: tl.constexpr):
    """Offsets of groups of rows."""
    offsets = groups * stride_j
    if ALIGNED:
        offsets = tl.multiple_of(offsets, 16)
    return offsets


@triton.jit
def _columns_of_x(order_ptr, start, COUNT: tl.constexpr):
    """Which columns of x meet the inputs of the weight from `start` on."""
    columns = start + tl.arange(0, COUNT)
    if order_ptr is not None:
        columns = tl.load(order_ptr + columns)
    return columns


@triton.jit
def product_of_few(
    x_ptrs,  # [BLOCK_T, 1]: rows of x
    x_mask,  # [BLOCK_T, 1]
    order_ptr,  # [32*Q], or None
    quants_ptrs,  # [BLOCK_J, 16]: rows of the weight
    scales_ptrs,  # [BLOCK_J, 16]
    zeros_ptrs,  # [BLOCK_J, 16], or None
    quants_stride_w,
    scales_stride_s,
    zeros_stride_s,
    Q,
    S,
):
    """[BLOCK_T, BLOCK_J, 16], float32, see the module's docstring."""
    BLOCK_T: tl.constexpr = x_ptrs.shape[0]
    BLOCK_J: tl.constexpr = quants_ptrs.shape[0]
    quants_ptrs = quants_ptrs[:, None, :] + (tl.arange(0, 4) * quants_stride_w)[None, :, None]
    field = (15 << 4 * tl.arange(0, 8))[:, None]
    power = 1 / (1 << 4 * (tl.arange(0, 32) % 8)).to(tl.float32)
    total = tl.zeros([BLOCK_T, BLOCK_J, 16], dtype=tl.float32)
    for group in range(S):
        product = tl.zeros([BLOCK_T, BLOCK_J, 16], dtype=tl.float32)
        x_lanes = tl.zeros([BLOCK_T, 32], dtype=tl.float32)
        for block in range(Q // S * group, Q // S * (group + 1)):
            x = tl.load(x_ptrs + _columns_of_x(order_ptr, block * 32, 32), mask=x_mask, other=0.0).to(tl.float32)
            quants = tl.load(quants_ptrs + block * 4 * quants_stride_w)[:, :, None, :]  # [BLOCK_J, 4, 1, 16]
            values = (quants & field).to(tl.uint32, bitcast=True).to(tl.float32)  # [BLOCK_J, 4, 8, 16]
            product += tl.sum(tl.sum(values * tl.reshape(x * power, [BLOCK_T, 1, 4, 8, 1]), axis=3), axis=2)
            x_lanes += x
        x_sum = tl.sum(x_lanes, axis=1)[:, None, None]
        scale = tl.load(scales_ptrs + group * scales_stride_s).to(tl.float32)  # [BLOCK_J, 16]
        if zeros_ptrs is not None:
            total += (product - tl.load(zeros_ptrs + group * zeros_stride_s).to(tl.float32) * x_sum) * scale
        else:
            total += (product - _MIDDLE * x_sum) * scale
    return total


@triton.jit(do_not_specialize=["T", "x_stride_t", "J", "Q", "S", *_STRIDES])
def _few_tokens_kernel(
    x_ptr,  # [T, 32*Q]
    quants_ptr,  # [J, 4*Q, 16]
    scales_ptr,  # [J, S, 16]
    zeros_ptr,  # [J, S, 16], or None
    order_ptr,  # [32*Q], or None
    bias_ptr,  # [16*J], or None
    out_ptr,  # [T, 16*J], contiguous
    T,
    x_stride_t,
    quants_stride_j,
    quants_stride_w,
    scales_stride_j,
    scales_stride_s,
    zeros_stride_j,
    zeros_stride_s,
    J,
    Q,
    S,
    BLOCK_T: tl.constexpr,  # at least T
    BLOCK_J: tl.constexpr,  # divides J
    ALIGNED: tl.constexpr,
):
    groups = tl.program_id(0).to(tl.int64) * BLOCK_J + tl.arange(0, BLOCK_J)
    rows = tl.arange(0, 16)
    tokens = tl.arange(0, BLOCK_T)[:, None].to(tl.int64)
    quants_ptrs = quants_ptr + _along_groups(groups, quants_stride_j, ALIGNED)[:, None] + rows
    scales_ptrs = scales_ptr + _along_groups(groups, scales_stride_j, ALIGNED)[:, None] + rows
    zeros_ptrs = zeros_ptr
    if zeros_ptr is not None:
        zeros_ptrs += _along_groups(groups, zeros_stride_j, ALIGNED)[:, None] + rows
    total = product_of_few(
        x_ptr + tokens * x_stride_t,
        tokens < T,
        order_ptr,
        quants_ptrs,
        scales_ptrs,
        zeros_ptrs,
        quants_stride_w,
        scales_stride_s,
        zeros_stride_s,
        Q,
        S,
    )
    columns = groups[:, None] * 16 + rows
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns).to(tl.float32)
    tl.store(out_ptr + (tokens * (16 * J))[:, :, None] + columns, total, mask=(tokens < T)[:, :, None])


@triton.jit
def unpacked(
    quants_ptrs,  # [rows]
    scales_ptrs,  # [rows]
    zeros_ptrs,  # [rows], or None
    start,
    blocks_per_group,
    quants_stride_w,
    scales_stride_s,
    zeros_stride_s,
    DEPTH: tl.constexpr,
    dtype: tl.constexpr,
):
    """The values of rows at inputs start to start + DEPTH - 1: [DEPTH, rows].

    The bits of q are put into the mantissa of a number from 1 to 2, which is 1 + q/16: for each value this is the least
    work, and the difference to the zero is exact.
    """
    block = start // 32 + tl.arange(0, DEPTH // 32)
    words = (block[:, None] * 4 + tl.arange(0, 4)) * quants_stride_w
    quants = tl.load(quants_ptrs + words[:, :, None])[:, :, None, :]  # [blocks, 4, 1, rows]
    value = tl.arange(0, 8)[:, None]  # of a word
    # Bits 4*value and up become bits 19 and up, the highest of the mantissa.
    quants = tl.where(value < 5, quants << (19 - 4 * value), quants >> (4 * value - 19))
    one_and_q = ((quants & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)  # [blocks, 4, 8, rows]
    group = (block // blocks_per_group)[:, None]
    scale = tl.load(scales_ptrs + group * scales_stride_s).to(tl.float32)  # [blocks, rows]
    if zeros_ptrs is not None:
        one_and_zero = 1 + tl.load(zeros_ptrs + group * zeros_stride_s).to(tl.float32) / 16
        difference = one_and_q - one_and_zero[:, None, None, :]
    else:
        difference = one_and_q - (1 + _MIDDLE / 16)
    weight = difference * (16 * scale)[:, None, None, :]
    return tl.reshape(weight.to(dtype), [DEPTH, quants_ptrs.shape[0]])


@triton.jit(do_not_specialize=["T", "x_stride_t", "J", "Q", "S", *_STRIDES])
def _tile_kernel(
    x_ptr,  # [T, 32*Q]
    quants_ptr,  # [J, 4*Q, 16]
    scales_ptr,  # [J, S, 16]
    zeros_ptr,  # [J, S, 16], or None
    order_ptr,  # [32*Q], or None
    bias_ptr,  # [16*J], or None
    out_ptr,  # [T, 16*J], contiguous
    T,
    x_stride_t,
    quants_stride_j,
    quants_stride_w,
    scales_stride_j,
    scales_stride_s,
    zeros_stride_j,
    zeros_stride_s,
    J,
    Q,
    S,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,  # divides J
    BLOCK_K: tl.constexpr,  # divides 32*Q
    ALIGNED: tl.constexpr,
):
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (tokens < T)[:, None]
    lanes = tl.arange(0, 16 * BLOCK_J)
    groups = tl.program_id(0).to(tl.int64) * BLOCK_J + lanes // 16
    rows = lanes % 16
    quants_ptrs = quants_ptr + _along_groups(groups, quants_stride_j, ALIGNED) + rows
    scales_ptrs = scales_ptr + _along_groups(groups, scales_stride_j, ALIGNED) + rows
    zeros_ptrs = zeros_ptr
    if zeros_ptr is not None:
        zeros_ptrs += _along_groups(groups, zeros_stride_j, ALIGNED) + rows
    x_ptrs = x_ptr + (tokens * x_stride_t)[:, None]
    total = tl.zeros([BLOCK_T, 16 * BLOCK_J], dtype=tl.float32)
    for start in range(0, 32 * Q, BLOCK_K):
        x = tl.load(x_ptrs + _columns_of_x(order_ptr, start, BLOCK_K), mask=inside, other=0.0)
        weight = unpacked(
            quants_ptrs,
            scales_ptrs,
            zeros_ptrs,
            start,
            Q // S,
            quants_stride_w,
            scales_stride_s,
            zeros_stride_s,
            BLOCK_K,
            x.dtype,
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    columns = groups * 16 + rows
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    tl.store(out_ptr + (tokens * (16 * J))[:, None] + columns, total, mask=inside)


@dataclass(frozen=True)
class W4A16Config:
    """block_t: tokens of a tile. block_j: groups of 16 rows. block_k: inputs of a tile."""

    block_t: int
    block_j: int
    block_k: int
    num_warps: int
    num_stages: int = 2


# More are faster by tiles: relative to a dense product in bfloat16, 3 tokens take 1.06 and by tiles 0.97, 2 tokens 0.87
# and 1.16 (3072 x 576, two cores of an AMD EPYC).
FEW_TOKENS = 2
# Tokens and inputs of a tile at most. A CPU takes high tiles, since a tile of the weight is unpacked anew for each, and
# deep ones, since sums go through memory after each; a GPU holds them in registers and 64 KiB of shared memory.
LARGEST_TILE = {"cpu": (256, 256)}
LARGEST_GPU_TILE = (64, 128)


@functools.cache
def select_config(num_tokens: int, num_groups: int, depth: int, has_order: bool, device: str) -> W4A16Config:
    """Tiles of a few groups of rows, without a rest, for as many tokens as there are.

    One token is read for by a program for each group, several by one for four of them. Where columns of x are gathered,
    which takes a CPU more than the products do, more groups share the work.

    Args:
        num_tokens, depth: rows and columns of x.
        num_groups: groups of 16 rows of the weight.
        has_order: whether columns of x are gathered.
        device: "cpu", or the device type of a GPU, where `tl.dot` takes 16 tokens at least.
    """
    most_tokens, most_inputs = LARGEST_TILE.get(device, LARGEST_GPU_TILE)
    block_t = min(next_power_of_2(num_tokens), most_tokens)
    block_k = math.gcd(depth, most_inputs)
    gathers = has_order and device == "cpu"
    if num_tokens <= FEW_TOKENS:
        block_j = math.gcd(num_groups, 8 if gathers else 1 if num_tokens == 1 else 4)
        return W4A16Config(block_t, block_j, block_k, num_warps=1)
    block_j = math.gcd(num_groups, 16 if gathers else 4)
    return W4A16Config(block_t if device == "cpu" else max(block_t, 16), block_j, block_k, num_warps=4)


_SIGNATURE = {
    "x_ptr": "*bf16",
    "quants_ptr": "*i32",
    "scales_ptr": "*fp16",
    "out_ptr": "*bf16",
} | dict.fromkeys(["T", "x_stride_t", *_STRIDES, "J", "Q", "S"], "i32")
_OPTIONAL = {"zeros_ptr": "*fp16", "order_ptr": "*i32", "bias_ptr": "*bf16"}


def _compile_case(num_tokens: int, **kind: bool) -> CompileCase:
    """kind: which of the optional arguments are there."""
    config = select_config(num_tokens, 384, 4096, "order_ptr" in kind, "cuda")
    kernel, tile = _few_tokens_kernel, {"BLOCK_T": config.block_t, "BLOCK_J": config.block_j}
    if num_tokens > FEW_TOKENS:
        kernel, tile = _tile_kernel, tile | {"BLOCK_K": config.block_k}
    return CompileCase(
        kernel,
        _SIGNATURE | {name: pointer for name, pointer in _OPTIONAL.items() if name in kind},
        tile | {"ALIGNED": True} | {name: None for name in _OPTIONAL if name not in kind},
        config.num_warps,
        config.num_stages,
    )


COMPILE_CASES = [
    _compile_case(num_tokens, **kind)
    for num_tokens in (1, 2, 16, 64)
    for kind in ({"zeros_ptr": True}, {"order_ptr": True, "bias_ptr": True})
]


@w4a16_mm.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_w4a16_mm(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, depth = x.shape
    num_groups, scales_per_row, _ = scales.shape
    out = x.new_empty(num_tokens, 16 * num_groups)
    if out.numel() == 0:
        return out
    config = select_config(num_tokens, num_groups, depth, order is not None, x.device.type)
    packed = (quants, scales) if zeros is None else (quants, scales, zeros)
    strides = (*quants.stride()[:2], *scales.stride()[:2], *((0, 0) if zeros is None else zeros.stride()[:2]))
    tensors = (x, quants, scales, zeros, order, bias, out)
    numbers = (num_tokens, x.stride(0), *strides, num_groups, depth // 32, scales_per_row)
    aligned = rows_aligned(*packed)
    grid: tuple[int, ...] = (num_groups // config.block_j,)
    tile: tuple[object, ...] = (config.block_t, config.block_j)
    if num_tokens <= FEW_TOKENS:
        launch(_few_tokens_kernel, grid, tensors, numbers, (*tile, aligned), config.num_warps, config.num_stages)
        return out
    grid, tile = (*grid, ceil_div(num_tokens, config.block_t)), (*tile, config.block_k)
    launch(_tile_kernel, grid, tensors, numbers, (*tile, aligned), config.num_warps, config.num_stages)
    return out
