"""Products by packed weights, unpacked a few blocks at a time, never as a whole.

A few tokens take a kernel of their own, bound by reading the weight: lanes are rows of it, and each input is one number
for all of them. A value is not shifted down: it is taken as a number where it stands in its word, and its input is
scaled by that power of two instead, which is exact. A block's values are summed as integers, and its scale is applied
to the sum:

    y[t, n] = sum_b scale[n, b] * (sum_k q[n, k] * x[t, k]) + minimum[n, b] * (sum_k x[t, k])

A CPU takes values of 4 bits and inputs in bf16 as pairs: 128 + q is exact in bf16, and its bits are those of q and of
128. It costs 4 of the 24 bits in which a block is summed:

    sum_k q[n, k] * x[t, k] = sum_k (128 + q[n, k]) * x[t, k] - 128 * sum_k x[t, k]

More tokens take the weight as a dense product does: a tile of it is unpacked into the dtype of x and multiplied.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.gguf_mm.layout import FORMATS, ROWS, format_of
from vllm_triton.ops.gguf_mm.op import gguf_mm
from vllm_triton.ops.gguf_mm.unpacking import in_pairs, place_in_word, scale_and_minimum, unpacked, words_of
from vllm_triton.ops.launch import CompileCase, ceil_div, launch, next_power_of_2, supports_triton

_STRIDES = ["quants_stride_j", "quants_stride_w", "scales_stride_j", "scales_stride_s"]


@triton.jit(do_not_specialize=["T", "x_stride_t", "J", "K", *_STRIDES])
def _few_tokens_kernel(
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
    BLOCK_T: tl.constexpr,  # at least T
    IN_PAIRS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, 32)
    tokens = tl.arange(0, BLOCK_T)[:, None].to(tl.int64)
    inside = tokens < T
    BITS: tl.constexpr = 8 if FORMAT == "Q8_0" or FORMAT == "Q6_K" else 4
    EACH: tl.constexpr = 32 // BITS
    HALVES: tl.constexpr = 2 if FORMAT == "Q6_K" else 1
    quants_ptrs = quants_ptr + group * quants_stride_j + rows
    scales_ptrs = scales_ptr + group * scales_stride_j + rows
    field = (((1 << BITS) - 1) << place_in_word(tl.arange(0, EACH), BITS))[:, None]
    power = 1 / (1 << place_in_word(tl.arange(0, 32) % EACH, BITS)).to(tl.float32)
    x_ptrs = x_ptr + tokens * x_stride_t + tl.arange(0, 32)
    total = tl.zeros([BLOCK_T, 32], dtype=tl.float32)
    for block in range(K // 32):
        inputs = tl.load(x_ptrs + block * 32, mask=inside, other=0.0)
        x = inputs.to(tl.float32)
        words = words_of(quants_ptrs, block + tl.arange(0, 1), quants_stride_w, FORMAT)
        scale, minimum = scale_and_minimum(scales_ptrs, block, scales_stride_s, FORMAT)
        if IN_PAIRS:
            products = tl.dot(inputs, in_pairs(tl.reshape(words, [4, 32])), input_precision="ieee")
            total += products * scale + tl.sum(x, axis=1)[:, None] * (minimum - 128 * scale)
        else:
            values = (words[:, :, :, :, None, :] & field).to(tl.uint32, bitcast=True).to(tl.float32)
            products = tl.sum(values * tl.reshape(x * power, [BLOCK_T, BITS // 4, 2, 2, EACH, 1]), axis=4)
            products = tl.sum(tl.reshape(products, [BLOCK_T, HALVES, BITS // HALVES, 32]), axis=2)
            x_sums = tl.sum(tl.reshape(x, [BLOCK_T, HALVES, 32 // HALVES]), axis=2)[:, :, None]
            if FORMAT == "Q6_K":
                total += tl.sum((products - 32 * x_sums) * tl.trans(tl.join(scale, minimum)), axis=1)
            else:
                total += tl.sum(products * scale + x_sums * minimum, axis=1)
    columns = group * 32 + rows
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns).to(tl.float32)
    tl.store(out_ptr + tokens * (32 * J) + columns, total, mask=inside)


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
    BLOCK_K: tl.constexpr,
    REST_K: tl.constexpr,  # divides what is left of K; 0 where nothing is
):
    group = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (tokens < T)[:, None]
    rows = tl.arange(0, 32)
    quants_ptrs = quants_ptr + group * quants_stride_j + rows
    scales_ptrs = scales_ptr + group * scales_stride_j + rows
    x_ptrs = x_ptr + (tokens * x_stride_t)[:, None]
    total = tl.zeros([BLOCK_T, 32], dtype=tl.float32)
    for start in range(0, K // BLOCK_K * BLOCK_K, BLOCK_K):
        x = tl.load(x_ptrs + tl.arange(0, BLOCK_K) + start, mask=inside, other=0.0)
        weight = unpacked(quants_ptrs, scales_ptrs, start, quants_stride_w, scales_stride_s, FORMAT, BLOCK_K, x.dtype)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if REST_K != 0:
        for start in range(K // BLOCK_K * BLOCK_K, K, REST_K):
            x = tl.load(x_ptrs + tl.arange(0, REST_K) + start, mask=inside, other=0.0)
            weight = unpacked(
                quants_ptrs, scales_ptrs, start, quants_stride_w, scales_stride_s, FORMAT, REST_K, x.dtype
            )
            total = tl.dot(x, weight, total, input_precision="ieee")
    columns = group * 32 + rows
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    tl.store(out_ptr + (tokens * (32 * J))[:, None] + columns, total, mask=inside)


@dataclass(frozen=True)
class GgufConfig:
    """is_few: whether the kernel of few tokens takes them, and in_pairs: as pairs of bf16. block_t: tokens of a tile.

    block_k: inputs of a tile; rest_k: of one of those that are left, 0 for none.
    """

    is_few: bool
    in_pairs: bool
    block_t: int
    block_k: int
    rest_k: int
    num_warps: int
    num_stages: int = 2


# More are faster by tiles. 32 rows and inputs of Q4_1 take 46 and 86 ns for 1 and 2 tokens one number at a time; in
# pairs 29, 39, 60 and 128 ns for 1, 2, 4 and 8; by tiles 110 and 155 ns for 4 and 8 (one core, AMD EPYC).
FEW_TOKENS = 2
FEW_TOKENS_IN_PAIRS = 8
# Tokens and inputs of a tile at most. A CPU takes high tiles, since a tile of the weight is unpacked anew for each, and
# deep ones, since sums go through memory after each; a GPU holds them in registers and 64 KiB of shared memory.
LARGEST_TILE = {"cpu": (256, 256)}
LARGEST_GPU_TILE = (64, 128)


@functools.cache
def select_config(num_tokens: int, depth: int, name: str, dtype: torch.dtype, device: str) -> GgufConfig:
    """Tiles of 32 rows of the weight, for as many tokens as there are.

    Args:
        num_tokens, depth: rows and columns of x.
        name: the weight's format.
        dtype: of x.
        device: "cpu", or the device type of a GPU, where `tl.dot` takes 16 tokens at least.
    """
    most_tokens, most_inputs = LARGEST_TILE.get(device, LARGEST_GPU_TILE)
    block_k = min(1 << (depth.bit_length() - 1), most_inputs)
    rest = depth % block_k
    block_t = min(next_power_of_2(num_tokens), most_tokens)
    in_pairs = device == "cpu" and dtype == torch.bfloat16 and name in ("Q4_0", "Q4_1", "Q4_K")
    if num_tokens <= (FEW_TOKENS_IN_PAIRS if in_pairs else FEW_TOKENS):
        return GgufConfig(True, in_pairs, block_t, block_k, rest & -rest, num_warps=1)
    block_t = block_t if device == "cpu" else max(block_t, 16)
    return GgufConfig(False, False, block_t, block_k, rest & -rest, num_warps=4)


_SIGNATURE = {"x_ptr": "*bf16", "quants_ptr": "*i32", "scales_ptr": "*i16", "out_ptr": "*bf16"} | dict.fromkeys(
    ["T", "x_stride_t", *_STRIDES, "J", "K"], "i32"
)


def _compile_cases(name: str) -> list[CompileCase]:
    one, tile = (select_config(num_tokens, 4096, name, torch.bfloat16, "cuda") for num_tokens in (1, 64))
    return [
        CompileCase(
            _few_tokens_kernel,
            _SIGNATURE,
            {"FORMAT": name, "BLOCK_T": one.block_t, "IN_PAIRS": one.in_pairs, "bias_ptr": None},
            one.num_warps,
            one.num_stages,
        ),
        CompileCase(
            _tile_kernel,
            _SIGNATURE | {"bias_ptr": "*bf16"},
            {"FORMAT": name, "BLOCK_T": tile.block_t, "BLOCK_K": tile.block_k, "REST_K": tile.rest_k},
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
    config = select_config(num_tokens, depth, layout.name, x.dtype, x.device.type)
    tensors = (x, quants, scales, bias, out)
    strides = (*quants.stride()[:2], *scales.stride()[:2])
    numbers = (num_tokens, x.stride(0), *strides, num_groups, depth)
    if config.is_few:
        few = (layout.name, config.block_t, config.in_pairs)
        launch(_few_tokens_kernel, (num_groups,), tensors, numbers, few, config.num_warps, config.num_stages)
        return out
    grid = (num_groups, ceil_div(num_tokens, config.block_t))
    constants = (layout.name, config.block_t, config.block_k, config.rest_k)
    launch(_tile_kernel, grid, tensors, numbers, constants, config.num_warps, config.num_stages)
    return out
