"""Soft capping of logits, one program for each block of a row; float32 between load and store.

    y = softcap * tanh(x / softcap)

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
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
from vllm_triton.ops.softcap_logits.op import softcap_logits

TWO_LOG2_E = tl.constexpr(2 * math.log2(math.e))


@triton.jit
def tanh(x):
    """Of float32. Near 0, where 1 - 2 / (1 + exp(2 x)) cancels, by the series up to x^7."""
    square = x * x
    series = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.04, series, 1.0 - 2.0 / (1.0 + tl.exp2(x * TWO_LOG2_E)))


@triton.jit(do_not_specialize=["logits_stride_b"])
def _softcap_logits_kernel(
    logits_ptr,  # [B, V]
    out_ptr,  # [B, V], contiguous
    logits_stride_b,
    softcap: tl.float32,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    STORE: tl.constexpr,  # cache modifier
):
    row = tl.program_id(0).to(tl.int64)
    logits_offset = row * logits_stride_b
    if ROWS_ALIGNED:
        logits_offset = tl.multiple_of(logits_offset, 16)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + logits_offset + columns, mask=columns < V, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * V + columns, softcap * tanh(logits / softcap), mask=columns < V, cache_modifier=STORE)


COMPILE_CASES = [
    CompileCase(
        _softcap_logits_kernel,
        {"logits_ptr": "*bf16", "out_ptr": "*bf16", "logits_stride_b": "i32", "softcap": "fp32"},
        {"V": 256000, "BLOCK_V": 1024, "ROWS_ALIGNED": True, "STORE": ""},
    )
]


@softcap_logits.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_softcap_logits(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    num_rows, num_columns = logits.shape
    out = logits.new_empty(logits.shape)
    if num_rows == 0:
        return out
    config = select_row_config(num_columns, logits.device.type)
    grid = (num_rows, ceil_div(num_columns, config.block))
    constants = (num_columns, config.block, rows_aligned(logits), store_modifier(out))
    launch(_softcap_logits_kernel, grid, (logits, out), (logits.stride(0), softcap), constants, config.num_warps)
    return out
