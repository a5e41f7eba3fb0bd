"""Dense projection, one program for each tile of the result; products and sums in float32.

    y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]

Programs run through the tiles in groups of GROUP_T tile rows, column by column, so that neighbours share tiles of the
weight while they are in the cache.

Source: Tillet, Kung and Cox, "Triton: An Intermediate Language and Compiler for Tiled Neural Network Computations".
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, ceil_div, launch, next_power_of_2, rows_aligned, supports_triton
from vllm_triton.ops.linear.op import linear

GROUP_T = 8


@triton.jit
def tile_of_program(program, T, N, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_T: tl.constexpr):
    """(tile row, tile column) of this program in the grouped order."""
    tiles_t = tl.cdiv(T, BLOCK_T)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_t = program // (GROUP_T * tiles_n) * GROUP_T
    group_size = min(tiles_t - first_t, GROUP_T)
    within = program % (GROUP_T * tiles_n)
    return first_t + within % group_size, within // group_size


@triton.jit(do_not_specialize=["T", "x_stride_t", "weight_stride_n"])
def _linear_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N], or None
    out_ptr,  # [T, N], contiguous
    T,
    x_stride_t,
    weight_stride_n,
    N,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_T: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
):
    tile_t, tile_n = tile_of_program(tl.program_id(0), T, N, BLOCK_T, BLOCK_N, GROUP_T)
    rows = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_offsets = rows * x_stride_t
    weight_offsets = columns * weight_stride_n
    if ROWS_ALIGNED:
        x_offsets = tl.multiple_of(x_offsets, 16)
        weight_offsets = tl.multiple_of(weight_offsets, 16)
    lanes = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_offsets[:, None] + lanes[None, :]  # [BLOCK_T, BLOCK_K]
    weight_ptrs = weight_ptr + weight_offsets[None, :] + lanes[:, None]  # [BLOCK_K, BLOCK_N]
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = lanes < K - start
        x = tl.load(x_ptrs + start, mask=(rows[:, None] < T) & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=(columns[None, :] < N) & inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_mask = (rows[:, None] < T) & (columns[None, :] < N)
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], total, mask=out_mask)


@dataclass(frozen=True)
class LinearConfig:
    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@functools.cache
def select_config(num_tokens: int, itemsize: int) -> LinearConfig:
    """Tiles that keep the loads in flight within 64 KiB of shared memory, the least that the GPUs in use offer.

    Few tokens are bound by reading the weight: narrow tiles give every multiprocessor some of it, and deep ones keep
    more loads in flight. Many tokens are bound by arithmetic: square tiles use each loaded element most often.

    Args:
        num_tokens: rows of x.
        itemsize: bytes of an element of x: a wider one halves the depth of a tile.
    """
    if num_tokens <= 16:  # tl.dot has no smaller tile
        return LinearConfig(16, 32, 256 // itemsize, num_warps=4, num_stages=4)
    if num_tokens <= 64:
        return LinearConfig(64, 64, 128 // itemsize, num_warps=4, num_stages=3)
    return LinearConfig(128, 128, 64 // itemsize, num_warps=8, num_stages=3)


@functools.cache
def select_cpu_config(num_tokens: int, depth: int) -> LinearConfig:
    """Tiles that read whole rows of x and of the weight, so that the weight streams through memory in order.

    Few tokens are one tile, and narrow ones share the rows of a small weight evenly among threads. Many make tiles high
    enough that arranging a tile of the weight for them costs little.

    Args:
        num_tokens: rows of x.
        depth: columns of x.
    """
    block_t = min(next_power_of_2(num_tokens), 256)
    block_k = min(max(next_power_of_2(depth), 16), 4096 if block_t <= 32 else 1024)
    block_n = 16 if block_t <= 4 else 64 if block_t <= 64 else 128
    return LinearConfig(block_t, block_n, block_k, num_warps=1, num_stages=1)


_SIGNATURE = {
    "x_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "out_ptr": "*bf16",
    "T": "i32",
    "x_stride_t": "i32",
    "weight_stride_n": "i32",
    "N": "i32",
    "K": "i32",
}


def _compile_case(num_tokens: int, has_bias: bool) -> CompileCase:
    config = select_config(num_tokens, torch.bfloat16.itemsize)
    return CompileCase(
        _linear_kernel,
        _SIGNATURE | ({"bias_ptr": "*bf16"} if has_bias else {}),
        {
            "BLOCK_T": config.block_t,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_T": GROUP_T,
            "ROWS_ALIGNED": True,
        }
        | ({} if has_bias else {"bias_ptr": None}),
        config.num_warps,
        config.num_stages,
    )


COMPILE_CASES = [
    _compile_case(1, has_bias=False),
    _compile_case(64, has_bias=True),
    _compile_case(1024, has_bias=False),
]


@linear.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    num_tokens, depth = x.shape
    num_columns = weight.shape[0]
    out = x.new_empty(num_tokens, num_columns)
    if out.numel() == 0:
        return out
    config = select_cpu_config(num_tokens, depth) if x.is_cpu else select_config(num_tokens, x.element_size())
    grid = (ceil_div(num_tokens, config.block_t) * ceil_div(num_columns, config.block_n),)
    tiles = (config.block_t, config.block_n, config.block_k)
    launch(
        _linear_kernel,
        grid,
        (x, weight, bias, out),
        (num_tokens, x.stride(0), weight.stride(0), num_columns, depth),
        (*tiles, GROUP_T, rows_aligned(x, weight)),
        config.num_warps,
        config.num_stages,
    )
    return out
