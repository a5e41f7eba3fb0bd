"""Activations as small numbers and scales, one program a token, in float32.

    values[t, k] = round(x[t, k] / scale)      scale = max |x| of those that share it / largest

A program finds the largest magnitude of its token or of groups of it, and reads the row again, from a cache, to divide.
One scale for the whole tensor takes a launch before: few programs find the largest magnitude of some tokens each, and
every program of the second launch takes the largest of theirs.

Source: Dettmers et al., "LLM.int8()", section 2.1; DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3.2.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import (
    WITHOUT_FP8,
    CompileCase,
    block_size,
    ceil_div,
    launch,
    next_power_of_2,
    rows_aligned,
    supports_weights,
)
from vllm_triton.ops.platforms import num_processors
from vllm_triton.ops.scaled_quant.op import scaled_quant
from vllm_triton.ops.scaled_quant.reference import PER_TENSOR, PER_TOKEN, SMALLEST_SCALE

# Elements of a token that a program holds at a time; it loops over a longer one.
LARGEST_BLOCK = 8192
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _largest_of(dtype: tl.constexpr):
    """The end of the range."""
    return 127.0 if dtype == tl.int8 else 448.0


@triton.jit
def _scale_of(largest, dtype: tl.constexpr):
    """The scale that maps a largest magnitude to the end of the range."""
    END: tl.constexpr = _largest_of(dtype)
    return tl.maximum(tl.div_rn(largest, END), _SMALLEST_SCALE)


@triton.jit
def _quantized(x, scale, dtype: tl.constexpr):
    """x over scale, cut and rounded."""
    END: tl.constexpr = _largest_of(dtype)
    values = tl.minimum(tl.maximum(tl.div_rn(x, scale), -END), END)
    if dtype == tl.int8:
        # Adding and taking away 1.5 * 2^23 leaves no bits for a fraction: rounded, ties to even.
        values = (values + ROUNDER) - ROUNDER
    return values.to(dtype)


@triton.jit
def _row(x_ptr, token, x_stride_t, ROWS_ALIGNED: tl.constexpr):
    offset = token * x_stride_t
    if ROWS_ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return x_ptr + offset


@triton.jit(do_not_specialize=["x_stride_t"])
def _groups_kernel(
    x_ptr,  # [T, K]
    values_ptr,  # [T, K], contiguous
    scales_ptr,  # [T, ceil(K / GROUP)], contiguous
    x_stride_t,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale: K, or BLOCK
    GROUPS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    x_ptr = _row(x_ptr, token, x_stride_t, ROWS_ALIGNED)
    values_ptr += token * K
    columns = groups[:, None] * GROUP + tl.arange(0, BLOCK)[None, :]
    largest = tl.zeros([GROUPS, BLOCK], dtype=tl.float32)
    for start in range(0, GROUP, BLOCK):
        x = tl.load(x_ptr + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    scale = _scale_of(tl.max(largest, axis=1), dtype)
    NUM_GROUPS: tl.constexpr = tl.cdiv(K, GROUP)
    tl.store(scales_ptr + token * NUM_GROUPS + groups, scale, mask=groups < NUM_GROUPS)
    for start in range(0, GROUP, BLOCK):
        x = tl.load(x_ptr + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)
        tl.store(values_ptr + start + columns, _quantized(x, scale[:, None], dtype), mask=start + columns < K)


@triton.jit(do_not_specialize=["T", "x_stride_t"])
def _largest_kernel(
    x_ptr,  # [T, K]
    largest_ptr,  # [programs]
    T,
    x_stride_t,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
):
    """The largest magnitude of every token that is a multiple of the number of programs after the program's first."""
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        row_ptr = _row(x_ptr, token, x_stride_t.to(tl.int64), ROWS_ALIGNED)
        for start in range(0, K, BLOCK):
            x = tl.load(row_ptr + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
    tl.store(largest_ptr + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["num_largest", "x_stride_t"])
def _tensor_kernel(
    x_ptr,  # [T, K]
    values_ptr,  # [T, K], contiguous
    scales_ptr,  # [1]
    given_ptr,  # [1]: the scale; None where it is to be found
    largest_ptr,  # [num_largest], or None
    num_largest,
    x_stride_t,
    K: tl.constexpr,
    MOST: tl.constexpr,  # at least num_largest
    BLOCK: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    if given_ptr is not None:
        scale = tl.load(given_ptr)
    else:
        lanes = tl.arange(0, MOST)
        largest = tl.max(tl.load(largest_ptr + lanes, mask=lanes < num_largest, other=0.0), axis=0)
        scale = _scale_of(largest, dtype)
    if token == 0:
        tl.store(scales_ptr, scale)
    columns = tl.arange(0, BLOCK)
    row_ptr = _row(x_ptr, token, x_stride_t, ROWS_ALIGNED)
    values_ptr += token * K
    for start in range(0, K, BLOCK):
        x = tl.load(row_ptr + start + columns, mask=start + columns < K, other=0.0).to(tl.float32)
        tl.store(values_ptr + start + columns, _quantized(x, scale, dtype), mask=start + columns < K)


@dataclass(frozen=True)
class ScaledQuantConfig:
    """group: columns that share a scale; groups: of a program; block: columns at a time."""

    group: int
    groups: int
    block: int
    num_warps: int


@functools.cache
def select_config(num_columns: int, group_size: int) -> ScaledQuantConfig:
    """A program for a token, or for as many groups of it as a block holds."""
    if group_size in (PER_TENSOR, PER_TOKEN):
        group, groups, block = num_columns, 1, block_size(num_columns, LARGEST_BLOCK)
    else:
        num_groups = ceil_div(num_columns, group_size)
        group, groups, block = group_size, block_size(num_groups, LARGEST_BLOCK // group_size), group_size
    return ScaledQuantConfig(group, groups, block, num_warps=min(max(groups * block // 512, 1), 8))


def _compile_cases(values: str, without: Mapping[str, str] | None = None) -> list[CompileCase]:
    """Per token, groups, and the whole tensor with a scale that is given and one that is found."""
    pointers = {"x_ptr": "*bf16", "values_ptr": values, "scales_ptr": "*fp32", "x_stride_t": "i32"}
    row: dict[str, Any] = {"K": 4096, "BLOCK": 4096, "ROWS_ALIGNED": True}
    tensor, most = pointers | {"num_largest": "i32"}, row | {"MOST": 512}
    cases: list[tuple[Callable[..., Any], dict[str, str], dict[str, Any]]] = [
        (_groups_kernel, pointers, row | {"GROUP": 4096, "GROUPS": 1}),
        (_groups_kernel, pointers, row | {"GROUP": 128, "GROUPS": 32, "BLOCK": 128}),
        (_tensor_kernel, tensor | {"given_ptr": "*fp32"}, most | {"largest_ptr": None}),
        (_tensor_kernel, tensor | {"largest_ptr": "*fp32"}, most | {"given_ptr": None}),
    ]
    return [CompileCase(*case, num_warps=8, without=without or {}) for case in cases]


_LARGEST_CASE = CompileCase(
    _largest_kernel,
    {"x_ptr": "*bf16", "largest_ptr": "*fp32", "T": "i32", "x_stride_t": "i32"},
    {"K": 4096, "BLOCK": 4096, "ROWS_ALIGNED": True},
    num_warps=8,
)
COMPILE_CASES = [_LARGEST_CASE, *_compile_cases("*i8"), *_compile_cases("*fp8e4nv", WITHOUT_FP8)]


@scaled_quant.impl("triton", supports=supports_weights, compile_cases=COMPILE_CASES)
def launch_scaled_quant(
    x: torch.Tensor, dtype: torch.dtype, group_size: int, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_columns = x.shape
    config = select_config(num_columns, group_size)
    num_groups = ceil_div(num_columns, config.group)
    values = x.new_empty(num_tokens, num_columns, dtype=dtype)
    per_tensor = group_size == PER_TENSOR
    scales = x.new_empty((1,) if per_tensor else (num_tokens, num_groups), dtype=torch.float32)
    if num_tokens == 0:
        return values, scales.fill_(SMALLEST_SCALE) if scale is None else scale.clone()
    constants = (config.block, rows_aligned(x))
    if scale is None and (not per_tensor or num_tokens == 1):  # one token is a whole tensor as well
        grid = (num_tokens, ceil_div(num_groups, config.groups))
        groups = (num_columns, config.group, config.groups, *constants)
        launch(_groups_kernel, grid, (x, values, scales), (x.stride(0),), groups, config.num_warps)
        return values, scales
    # Enough to keep every processor busy, and few for the second launch to read.
    most = next_power_of_2(2 * num_processors(x.device))
    num_largest, largest = min(num_tokens, most), None
    if scale is None:
        largest = x.new_empty(num_largest, dtype=torch.float32)
        numbers = (num_tokens, x.stride(0))
        launch(_largest_kernel, (num_largest,), (x, largest), numbers, (num_columns, *constants), config.num_warps)
    launch(
        _tensor_kernel,
        (num_tokens,),
        (x, values, scales, scale, largest),
        (num_largest, x.stride(0)),
        (num_columns, most, *constants),
        config.num_warps,
    )
    return values, scales
