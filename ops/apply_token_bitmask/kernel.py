"""Forbidding tokens by a bitmask, one program a block of a row's tokens. Nothing is computed: no accumulation.

Source: Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models".
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.apply_token_bitmask.op import apply_token_bitmask
from vllm_triton.ops.launch import CompileCase, block_size, ceil_div, launch, supports_triton

# 16 tokens for each of 128 threads.
LARGEST_BLOCK = 2048


@triton.jit(
    do_not_specialize=["logits_stride_b", "bitmask_stride_r"],
    do_not_specialize_on_alignment=["logits_ptr", "bitmask_ptr", "rows_ptr"],
)
def _apply_token_bitmask_kernel(
    logits_ptr,  # [B, V]
    bitmask_ptr,  # [R, W]
    rows_ptr,  # [R]
    logits_stride_b,
    bitmask_stride_r,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """logits[rows[r], v] = -inf where bit v % 32 of bitmask[r, v // 32] is 0 and rows[r] >= 0.

    Source: Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models".
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + number)
    if row < 0:  # padding
        return
    tokens = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    words = tl.load(bitmask_ptr + number * bitmask_stride_r + tokens // 32, mask=tokens < V, other=-1)
    is_forbidden = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride_b + tokens, float("-inf"), mask=is_forbidden & (tokens < V))


COMPILE_CASES = [
    CompileCase(
        _apply_token_bitmask_kernel,
        {"logits_ptr": "*fp32", "bitmask_ptr": "*i32", "rows_ptr": "*i64"}
        | dict.fromkeys(("logits_stride_b", "bitmask_stride_r"), "i32"),
        {"V": 49152, "BLOCK_V": LARGEST_BLOCK},
    )
]


@apply_token_bitmask.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    vocabulary = logits.shape[1]
    if rows.shape[0] == 0:
        return
    block = block_size(vocabulary, LARGEST_BLOCK)
    grid = (rows.shape[0], ceil_div(vocabulary, block))
    strides = (logits.stride(0), bitmask.stride(0))
    launch(_apply_token_bitmask_kernel, grid, (logits, bitmask, rows), strides, (vocabulary, block))
