"""The sum over a token's experts, one program for each block of a row; sums in float32."""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, ceil_div, launch, rows_aligned, select_row_config, supports_triton
from vllm_triton.ops.moe_sum.op import moe_sum


@triton.jit(do_not_specialize=["x_stride_t", "x_stride_k", "ids_stride_t"])
def _moe_sum_kernel(
    x_ptr,  # [T, K, E]
    ids_ptr,  # [T, K]
    map_ptr,  # [X], or None
    out_ptr,  # [T, E], contiguous
    x_stride_t,
    x_stride_k,
    ids_stride_t,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], dtype=tl.float32)
    for choice in range(K):
        expert = tl.load(ids_ptr + row * ids_stride_t + choice)
        is_present = expert >= 0
        if map_ptr is not None:
            is_present = is_present & (tl.load(map_ptr + expert, mask=is_present, other=-1) >= 0)
        x_offset = row * x_stride_t + tl.cast(choice, tl.int64) * x_stride_k
        if ROWS_ALIGNED:
            x_offset = tl.multiple_of(x_offset, 16)
        total += tl.load(x_ptr + x_offset + columns, mask=is_present & (columns < E), other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + columns, total, mask=columns < E)


COMPILE_CASES = [
    CompileCase(
        _moe_sum_kernel,
        {"x_ptr": "*bf16", "ids_ptr": "*i32", "map_ptr": "*i32", "out_ptr": "*bf16"}
        | dict.fromkeys(["x_stride_t", "x_stride_k", "ids_stride_t"], "i32"),
        {"K": 8, "E": 2048, "BLOCK_E": 1024, "ROWS_ALIGNED": True},
    )
]


@moe_sum.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_moe_sum(x: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    num_tokens, num_choices, num_columns = x.shape
    out = x.new_empty(num_tokens, num_columns)
    if out.numel() == 0:
        return out
    config = select_row_config(num_columns, x.device.type)
    launch(
        _moe_sum_kernel,
        (num_tokens, ceil_div(num_columns, config.block)),
        (x, topk_ids, expert_map, out),
        (x.stride(0), x.stride(1), topk_ids.stride(0)),
        (num_choices, num_columns, config.block, rows_aligned(x)),
        config.num_warps,
    )
    return out
