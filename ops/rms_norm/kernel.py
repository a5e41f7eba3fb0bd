"""RMSNorm, one program a row: one pass for the mean square, one to scale; float32 throughout.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, block_size, launch, store_modifier, supports_triton
from vllm_triton.ops.rms_norm.op import rms_norm

# A row up to this size stays in registers; longer ones loop. 8192 bf16 values are 16 KiB a program.
LARGEST_BLOCK = 8192


@triton.jit(do_not_specialize=["x_stride_t", "out_stride_t"])
def _rms_norm_kernel(
    x_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E]
    x_stride_t,
    out_stride_t,
    eps: tl.float32,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STORE: tl.constexpr,  # cache modifier
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_E)
    squares = tl.zeros([BLOCK_E], dtype=tl.float32)
    for start in range(0, E, BLOCK_E):
        mask = start + lanes < E
        x = tl.load(x_ptr + row * x_stride_t + start + lanes, mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares) / E + eps)
    for start in range(0, E, BLOCK_E):
        mask = start + lanes < E
        x = tl.load(x_ptr + row * x_stride_t + start + lanes, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + lanes, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * out_stride_t + start + lanes, x * scale * weight, mask=mask, cache_modifier=STORE)


@dataclass(frozen=True)
class RmsNormConfig:
    block_e: int
    num_warps: int


@functools.cache
def select_config(num_columns: int) -> RmsNormConfig:
    block = block_size(num_columns, LARGEST_BLOCK)
    return RmsNormConfig(block, num_warps=min(max(block // 512, 1), 8))


COMPILE_CASES = [
    CompileCase(
        _rms_norm_kernel,
        {
            "x_ptr": "*bf16",
            "weight_ptr": "*bf16",
            "out_ptr": "*bf16",
            "x_stride_t": "i32",
            "out_stride_t": "i32",
            "eps": "fp32",
        },
        {"E": 4096, "BLOCK_E": 4096, "STORE": ""},
        num_warps=8,
    )
]


@rms_norm.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, num_columns = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return out
    config = select_config(num_columns)
    numbers = (x.stride(0), out.stride(0), eps)
    constants = (num_columns, config.block_e, store_modifier(out))
    launch(_rms_norm_kernel, (num_rows,), (x, weight, out), numbers, constants, config.num_warps)
    return out
