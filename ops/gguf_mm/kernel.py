"""Products by packed weights, unpacked a few blocks at a time, never as a whole.

One token takes a kernel of its own, bound by reading the weight: lanes are rows of it, and each input is one number for
all of them. A value is not shifted down: it is taken as a number where it stands in its word, and its input is scaled
by that power of two instead, which is exact. A block's values are summed as integers, and its scale is applied to the
sum:

    y[t, n] = sum_b scale[n, b] * (sum_k q[n, k] * x[t, k]) + minimum[n, b] * (sum_k x[t, k])

More tokens take the weight as a dense product does: a tile of it is unpacked into the dtype of x and multiplied.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.gguf_mm.layout import FORMATS, ROWS, format_of
from vllm_triton.ops.gguf_mm.op import gguf_mm
from vllm_triton.ops.gguf_mm.unpacking import scale_and_minimum, unpacked, words_of
from vllm_triton.ops.launch import CompileCase, ceil_div, launch, next_power_of_2, supports_triton

_STRIDES = ["quants_stride_j", "quants_stride_w", "scales_stride_j", "scales_stride_s"]


@triton.jit(do_not_specialize=["K", *_STRIDES])
def _one_token_kernel(
    x_ptr,  # [1, K]
    quants_ptr,  # [J, W, 32]
    scales_ptr,  # [J, S, 32]
    bias_ptr,  # [32*J], or None
    out_ptr,  # [1, 32*J], contiguous
    quants_stride_j,
    quants_stride_w,
    scales_stride_j,
    scales_stride_s,
    K,
    FORMAT: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, 32)
    BITS: tl.constexpr = 8 if FORMAT == "Q8_0" or FORMAT == "Q6_K" else 4
    EACH: tl.constexpr = 32 // BITS
    HALVES: tl.constexpr = 2 if FORMAT == "Q6_K" else 1
    quants_ptrs = quants_ptr + group * quants_stride_j + rows
    scales_ptrs = scales_ptr + group * scales_stride_j + rows
    field = (((1 << BITS) - 1) << BITS * tl.arange(0, EACH))[:, None]
    power = 1 / (1 << BITS * (tl.arange(0, 32) % EACH)).to(tl.float32)
    total = tl.zeros([32], dtype=tl.float32)
    for block in range(K // 32):
        x = tl.load(x_ptr + block * 32 + tl.arange(0, 32)).to(tl.float32)
        words = words_of(quants_ptrs, block + tl.arange(0, 1), quants_stride_w, FORMAT)
        values = (words[:, :, :, :, None, :] & field).to(tl.uint32, bitcast=True).to(tl.float32)
        products = tl.sum(values * tl.reshape(x * power, [1, BITS // 4, 2, 2, EACH, 1]), axis=4)
        products = tl.sum(tl.reshape(products, [HALVES, BITS // HALVES, 32]), axis=1)
        x_sums = tl.sum(tl.reshape(x, [HALVES, 32 // HALVES]), axis=1)[:, None]
        scale, minimum = scale_and_minimum(scales_ptrs, block, scales_stride_s, FORMAT)
        if FORMAT == "Q6_K":
            total += tl.sum((products - 32 * x_sums) * tl.trans(tl.join(scale, minimum)), axis=0)
        else:
            total += tl.sum(products * scale[None, :] + x_sums * minimum[None, :], axis=0)
    columns = group * 32 + rows
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns).to(tl.float32)
    tl.store(out_ptr + columns, total)


@triton.jit(do_not_specialize=["T", "x_stride_t", "J", "K", *_STRIDES])
def _tile_kernel(
    x_ptr,  # [T, K]
    quants_ptr,  # [J, W, 32]
    scales_ptr,  # [J, S, 32]
    bias_ptr,  # [32*J], or None
    out_ptr,  # [T, 32*J], contiguous
    T,
    x_stride_t,
    quants_stride_j,
    quants_stride_w,
    scales_stride_j,
    scales_stride_s,
    J,
    K,
    FORMAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides K
):
    group = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (tokens < T)[:, None]
    rows = tl.arange(0, 32)
    quants_ptrs = quants_ptr + group * quants_stride_j + rows
    scales_ptrs = scales_ptr + group * scales_stride_j + rows
    x_ptrs = x_ptr + (tokens * x_stride_t)[:, None] + tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_T, 32], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + start, mask=inside, other=0.0)
        weight = unpacked(quants_ptrs, scales_ptrs, start, quants_stride_w, scales_stride_s, FORMAT, BLOCK_K, x.dtype)
        total = tl.dot(x, weight, total, input_precision="ieee")
    columns = group * 32 + rows
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    tl.store(out_ptr + (tokens * (32 * J))[:, None] + columns, total, mask=inside)


@dataclass(frozen=True)
class GgufConfig:
    """block_t: tokens of a tile, 1 for the kernel of one token. block_k: inputs of a tile, a divisor of all."""

    block_t: int
    block_k: int
    num_warps: int
    num_stages: int = 2


# A CPU takes high tiles, since a tile of the weight is unpacked anew for each; a GPU keeps them in registers.
MOST_TOKENS = {"cpu": 256}
MOST_TOKENS_GPU = 64


@functools.cache
def select_config(num_tokens: int, depth: int, device: str) -> GgufConfig:
    """Tiles of 32 rows of the weight, for as many tokens as there are.

    Args:
        num_tokens, depth: rows and columns of x.
        device: "cpu", or the device type of a GPU, where `tl.dot` takes 16 tokens at least.
    """
    block_k = min(depth & -depth, 128)
    if num_tokens == 1:
        return GgufConfig(1, block_k, num_warps=1)
    block_t = min(next_power_of_2(num_tokens), MOST_TOKENS.get(device, MOST_TOKENS_GPU))
    return GgufConfig(block_t if device == "cpu" else max(block_t, 16), block_k, num_warps=4)


_SIGNATURE = {"x_ptr": "*bf16", "quants_ptr": "*i32", "scales_ptr": "*i16", "out_ptr": "*bf16", "K": "i32"} | (
    dict.fromkeys(_STRIDES, "i32")
)


def _compile_cases(name: str) -> list[CompileCase]:
    one, tile = select_config(1, 4096, "cuda"), select_config(64, 4096, "cuda")
    return [
        CompileCase(_one_token_kernel, _SIGNATURE, {"FORMAT": name, "bias_ptr": None}, one.num_warps, one.num_stages),
        CompileCase(
            _tile_kernel,
            _SIGNATURE | {"bias_ptr": "*bf16", "T": "i32", "x_stride_t": "i32", "J": "i32"},
            {"FORMAT": name, "BLOCK_T": tile.block_t, "BLOCK_K": tile.block_k},
            tile.num_warps,
            tile.num_stages,
        ),
    ]


COMPILE_CASES = [case for name in FORMATS for case in _compile_cases(name)]


@gguf_mm.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_gguf_mm(
    x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    num_tokens, depth = x.shape
    num_groups = quants.shape[0]
    out = x.new_empty(num_tokens, ROWS * num_groups)
    if out.numel() == 0:
        return out
    layout = format_of(depth, quants.shape[1], scales.shape[1])
    assert layout is not None, "the contract admits known formats alone"
    config = select_config(num_tokens, depth, x.device.type)
    tensors = (x, quants, scales, bias, out)
    strides = (*quants.stride()[:2], *scales.stride()[:2])
    if num_tokens == 1:
        numbers = (*strides, depth)
        launch(_one_token_kernel, (num_groups,), tensors, numbers, (layout.name,), config.num_warps, config.num_stages)
        return out
    grid = (num_groups, ceil_div(num_tokens, config.block_t))
    numbers = (num_tokens, x.stride(0), *strides, num_groups, depth)
    constants = (layout.name, config.block_t, config.block_k)
    launch(_tile_kernel, grid, tensors, numbers, constants, config.num_warps, config.num_stages)
    return out
