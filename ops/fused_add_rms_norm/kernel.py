"""Residual addition and RMSNorm, one program a row: one pass adds and squares, one scales; float32 throughout.

    s = x + residual, rounded;  y = s * rsqrt(mean s^2 + eps) * weight

The second pass adds again instead of reading the stored sum: a program may not see its own stores without a barrier,
and the two rows are still in the cache.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.fused_add_rms_norm.op import fused_add_rms_norm
from vllm_triton.ops.launch import CompileCase, launch, rows_aligned, store_modifier, supports_triton
from vllm_triton.ops.rms_norm.kernel import select_config


@triton.jit
def _load_sum(x_ptr, residual_ptr, columns, mask):
    """x + residual at these columns, rounded as it is stored, in float32."""
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return (x + residual).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["x_stride_t", "residual_stride_t"])
def _fused_add_rms_norm_kernel(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E], contiguous
    residual_out_ptr,  # [T, E], contiguous
    x_stride_t,
    residual_stride_t,
    eps: tl.float32,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    STORE: tl.constexpr,  # cache modifier
):
    row = tl.program_id(0).to(tl.int64)
    x_offset = row * x_stride_t
    residual_offset = row * residual_stride_t
    if ROWS_ALIGNED:
        x_offset = tl.multiple_of(x_offset, 16)
        residual_offset = tl.multiple_of(residual_offset, 16)
    lanes = tl.arange(0, BLOCK_E)
    squares = tl.zeros([BLOCK_E], dtype=tl.float32)
    for start in range(0, E, BLOCK_E):
        columns = start + lanes
        total = _load_sum(x_ptr + x_offset, residual_ptr + residual_offset, columns, columns < E)
        tl.store(residual_out_ptr + row * E + columns, total, mask=columns < E, cache_modifier=STORE)
        squares += total * total
    scale = tl.rsqrt(tl.sum(squares) / E + eps)
    for start in range(0, E, BLOCK_E):
        columns = start + lanes
        total = _load_sum(x_ptr + x_offset, residual_ptr + residual_offset, columns, columns < E)
        weight = tl.load(weight_ptr + columns, mask=columns < E, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * E + columns, total * scale * weight, mask=columns < E, cache_modifier=STORE)


COMPILE_CASES = [
    CompileCase(
        _fused_add_rms_norm_kernel,
        {
            "x_ptr": "*bf16",
            "residual_ptr": "*bf16",
            "weight_ptr": "*bf16",
            "out_ptr": "*bf16",
            "residual_out_ptr": "*bf16",
            "x_stride_t": "i32",
            "residual_stride_t": "i32",
            "eps": "fp32",
        },
        {"E": 4096, "BLOCK_E": 4096, "ROWS_ALIGNED": True, "STORE": ""},
        num_warps=8,
    )
]


@fused_add_rms_norm.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_columns = x.shape
    out, residual_out = x.new_empty(x.shape), x.new_empty(x.shape)
    if num_rows == 0:
        return out, residual_out
    config = select_config(num_columns)
    launch(
        _fused_add_rms_norm_kernel,
        (num_rows,),
        (x, residual, weight, out, residual_out),
        (x.stride(0), residual.stride(0), eps),
        (num_columns, config.block_e, rows_aligned(x, residual), store_modifier(out, residual_out)),
        config.num_warps,
    )
    return out, residual_out
