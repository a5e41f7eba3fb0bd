"""Soft capping of logits, one program for each block of a row; float32 between load and store.

    y = softcap * tanh(x / softcap)

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import (
    CompileCase,
    block_size,
    ceil_div,
    launch,
    rows_aligned,
    store_modifier,
    supports_triton,
)
from vllm_triton.ops.softcap_logits.op import softcap_logits

# Elements of a program: 8 for each of 128 threads, so that a bfloat16 row loads 16 bytes a thread.
LARGEST_BLOCK = 1024
# A CPU reads rows in order.
LARGEST_CPU_BLOCK = 4096
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


@dataclass(frozen=True)
class SoftcapLogitsConfig:
    block_v: int
    num_warps: int = 4


@functools.cache
def select_config(num_columns: int, device: str) -> SoftcapLogitsConfig:
    return SoftcapLogitsConfig(block_size(num_columns, LARGEST_CPU_BLOCK if device == "cpu" else LARGEST_BLOCK))


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
    config = select_config(num_columns, logits.device.type)
    grid = (num_rows, ceil_div(num_columns, config.block_v))
    constants = (num_columns, config.block_v, rows_aligned(logits), store_modifier(out))
    launch(_softcap_logits_kernel, grid, (logits, out), (logits.stride(0), softcap), constants, config.num_warps)
    return out
