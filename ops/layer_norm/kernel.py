"""Layer normalisation, one program a row: mean, variance about it, result; float32 throughout.

The variance takes a pass of its own, since mean(x^2) - mean(x)^2 cancels where the mean is large. A row that fits a
block is loaded once and kept in registers; a longer one is read again for each pass.

Source: Ba, Kiros and Hinton, "Layer Normalization", equation 4.
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, rows_aligned, store_modifier, supports_triton
from vllm_triton.ops.layer_norm.op import layer_norm
from vllm_triton.ops.rms_norm.kernel import select_config


@triton.jit
def _load(ptr, columns, E: tl.constexpr):
    return tl.load(ptr + columns, mask=columns < E, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["x_stride_t"])
def _layer_norm_kernel(
    x_ptr,  # [T, E]
    weight_ptr,  # [E]
    bias_ptr,  # [E] or None
    out_ptr,  # [T, E], contiguous
    x_stride_t,
    eps: tl.float32,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    STORE: tl.constexpr,  # cache modifier
):
    row = tl.program_id(0).to(tl.int64)
    x_offset = row * x_stride_t
    if ROWS_ALIGNED:
        x_offset = tl.multiple_of(x_offset, 16)
    x_ptr += x_offset
    lanes = tl.arange(0, BLOCK_E)
    sums = tl.zeros([BLOCK_E], dtype=tl.float32)
    for start in range(0, E, BLOCK_E):
        sums += _load(x_ptr, start + lanes, E)
    mean = tl.sum(sums) / E
    squares = tl.zeros([BLOCK_E], dtype=tl.float32)
    for start in range(0, E, BLOCK_E):
        centred = tl.where(start + lanes < E, _load(x_ptr, start + lanes, E) - mean, 0.0)
        squares += centred * centred
    scale = tl.rsqrt(tl.sum(squares) / E + eps)
    for start in range(0, E, BLOCK_E):
        columns = start + lanes
        result = (_load(x_ptr, columns, E) - mean) * scale * _load(weight_ptr, columns, E)
        if bias_ptr is not None:
            result += _load(bias_ptr, columns, E)
        tl.store(out_ptr + row * E + columns, result, mask=columns < E, cache_modifier=STORE)


COMPILE_CASES = [
    CompileCase(
        _layer_norm_kernel,
        {
            "x_ptr": "*bf16",
            "weight_ptr": "*bf16",
            "bias_ptr": "*bf16",
            "out_ptr": "*bf16",
            "x_stride_t": "i32",
            "eps": "fp32",
        },
        {"E": 2560, "BLOCK_E": 4096, "ROWS_ALIGNED": True, "STORE": ""},
        num_warps=8,
    )
]


@layer_norm.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    num_rows, num_columns = x.shape
    out = x.new_empty(x.shape)
    if num_rows == 0:
        return out
    config = select_config(num_columns)
    constants = (num_columns, config.block_e, rows_aligned(x), store_modifier(out))
    launch(_layer_norm_kernel, (num_rows,), (x, weight, bias, out), (x.stride(0), eps), constants, config.num_warps)
    return out
