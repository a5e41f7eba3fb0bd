"""SiLU and multiplication, one program for each block of a row; float32 between load and store.

    y = gate / (1 + exp(-gate)) * up

Source: Shazeer, "GLU Variants Improve Transformer", equation 6 (SwiGLU).
"""

import math

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import (
    CompileCase,
    ceil_div,
    launch,
    rows_aligned,
    select_row_config,
    store_modifier,
    supports_triton,
)
from vllm_triton.ops.silu_and_mul.op import silu_and_mul

MINUS_LOG2_E = tl.constexpr(-math.log2(math.e))


@triton.jit(do_not_specialize=["x_stride_t"])
def _silu_and_mul_kernel(
    x_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I], contiguous
    x_stride_t,
    I: tl.constexpr,  # noqa: E741  (the glossary's name)
    BLOCK_I: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    STORE: tl.constexpr,  # cache modifier
):
    row = tl.program_id(0).to(tl.int64)
    x_offset = row * x_stride_t
    if ROWS_ALIGNED:
        x_offset = tl.multiple_of(x_offset, 16)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = columns < I
    gate = tl.load(x_ptr + x_offset + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + x_offset + I + columns, mask=mask, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp2(gate * MINUS_LOG2_E))
    tl.store(out_ptr + row * I + columns, silu * up, mask=mask, cache_modifier=STORE)


COMPILE_CASES = [
    CompileCase(
        _silu_and_mul_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16", "x_stride_t": "i32"},
        {"I": 14336, "BLOCK_I": 1024, "ROWS_ALIGNED": True, "STORE": ""},
    )
]


@silu_and_mul.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    num_rows, num_columns = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_rows, num_columns)
    if out.numel() == 0:
        return out
    config = select_row_config(num_columns, x.device.type)
    grid = (num_rows, ceil_div(num_columns, config.block))
    constants = (num_columns, config.block, rows_aligned(x), store_modifier(out))
    launch(_silu_and_mul_kernel, grid, (x, out), (x.stride(0),), constants, config.num_warps)
    return out
