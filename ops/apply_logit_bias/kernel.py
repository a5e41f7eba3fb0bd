"""Logit bias, one program a block of pairs. The pairs are distinct, so no two lanes write one logit.

Source: the `logit_bias` parameter of OpenAI's completions API.
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.apply_logit_bias.op import apply_logit_bias
from vllm_triton.ops.launch import CompileCase, ceil_div, launch, supports_triton

# Each lane touches a cache line of its own: small programs spread over more of the device.
BLOCK_N = 128


@triton.jit(
    do_not_specialize=["num_pairs", "logits_stride_b"],
    do_not_specialize_on_alignment=["rows_ptr", "token_ids_ptr", "bias_ptr"],
)
def _apply_logit_bias_kernel(
    logits_ptr,  # [B, V]
    rows_ptr,  # [N]
    token_ids_ptr,  # [N]
    bias_ptr,  # [N]
    num_pairs,
    logits_stride_b,
    BLOCK_N: tl.constexpr,
):
    """logits[rows[n], token_ids[n]] += bias[n] where rows[n] >= 0.

    Source: the `logit_bias` parameter of OpenAI's completions API.
    """
    pairs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(rows_ptr + pairs, mask=pairs < num_pairs, other=-1)
    mask = rows >= 0
    offsets = rows * logits_stride_b + tl.load(token_ids_ptr + pairs, mask=mask, other=0)
    bias = tl.load(bias_ptr + pairs, mask=mask, other=0.0)
    tl.store(logits_ptr + offsets, tl.load(logits_ptr + offsets, mask=mask, other=0.0) + bias, mask=mask)


COMPILE_CASES = [
    CompileCase(
        _apply_logit_bias_kernel,
        {
            "logits_ptr": "*fp32",
            "rows_ptr": "*i64",
            "token_ids_ptr": "*i64",
            "bias_ptr": "*fp32",
            "num_pairs": "i32",
            "logits_stride_b": "i32",
        },
        {"BLOCK_N": BLOCK_N},
    )
]


@apply_logit_bias.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_apply_logit_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    num_pairs = rows.shape[0]
    if num_pairs == 0:
        return
    grid = (ceil_div(num_pairs, BLOCK_N),)
    numbers = (num_pairs, logits.stride(0))
    launch(_apply_logit_bias_kernel, grid, (logits, rows, token_ids, bias), numbers, (BLOCK_N,))
