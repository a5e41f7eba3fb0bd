"""Penalties, one program a block of history positions of one row.

A token is written by the program that holds its first occurrence, which finds it and counts the output's occurrences
by comparing its block with the row's whole history: L^2 comparisons a row, but no workspace and no atomics.

Source: Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation", section 4.1;
OpenAI's API reference, "Frequency and presence penalties".
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.apply_penalties.op import apply_penalties
from vllm_triton.ops.launch import CompileCase, ceil_div, launch, supports_triton

# 64 x 64 comparisons are 32 a thread.
BLOCK_L = 64


@triton.jit(
    do_not_specialize=["logits_stride_b", "history_stride_b"],
    do_not_specialize_on_alignment=[
        "history_ptr",
        "prompt_lens_ptr",
        "total_lens_ptr",
        "repetition_ptr",
        "frequency_ptr",
        "presence_ptr",
    ],
)
def _apply_penalties_kernel(
    logits_ptr,  # [B, V]
    history_ptr,  # [B, L]
    prompt_lens_ptr,  # [B]
    total_lens_ptr,  # [B]
    repetition_ptr,  # [B]
    frequency_ptr,  # [B]
    presence_ptr,  # [B]
    logits_stride_b,
    history_stride_b,
    BLOCK_L: tl.constexpr,
):
    """x = x / repetition if x > 0 else x * repetition; x -= frequency * count + presence where count > 0.

    Source: Keskar et al., "CTRL", section 4.1; OpenAI's API reference, "Frequency and presence penalties".
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_L
    total_len = tl.load(total_lens_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    neutral = (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0)
    if neutral | (first >= total_len):
        return

    prompt_len = tl.load(prompt_lens_ptr + row)
    row_history_ptr = history_ptr + row * history_stride_b
    positions = first + tl.arange(0, BLOCK_L)
    tokens = tl.load(row_history_ptr + positions, mask=positions < total_len, other=-1)
    counts = tl.zeros([BLOCK_L], dtype=tl.int32)
    earlier = tl.zeros([BLOCK_L], dtype=tl.int32)
    for start in range(0, total_len, BLOCK_L):
        others = start + tl.arange(0, BLOCK_L)
        other_tokens = tl.load(row_history_ptr + others, mask=others < total_len, other=-2)
        same = tokens[:, None] == other_tokens[None, :]
        counts += tl.sum((same & (others >= prompt_len)[None, :]).to(tl.int32), axis=1)
        earlier += tl.sum((same & (others[None, :] < positions[:, None])).to(tl.int32), axis=1)

    mask = (positions < total_len) & (earlier == 0)
    logit_ptrs = logits_ptr + row * logits_stride_b + tokens
    logits = tl.load(logit_ptrs, mask=mask, other=0.0)
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits -= tl.where(counts > 0, frequency * counts + presence, 0.0)
    tl.store(logit_ptrs, logits, mask=mask)


COMPILE_CASES = [
    CompileCase(
        _apply_penalties_kernel,
        {
            "logits_ptr": "*fp32",
            "history_ptr": "*i32",
            "prompt_lens_ptr": "*i32",
            "total_lens_ptr": "*i32",
            "repetition_ptr": "*fp32",
            "frequency_ptr": "*fp32",
            "presence_ptr": "*fp32",
            "logits_stride_b": "i32",
            "history_stride_b": "i32",
        },
        {"BLOCK_L": BLOCK_L},
    )
]


@apply_penalties.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_apply_penalties(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    num_rows, num_positions = history.shape
    if num_rows == 0 or num_positions == 0:
        return
    launch(
        _apply_penalties_kernel,
        (num_rows, ceil_div(num_positions, BLOCK_L)),
        (logits, history, prompt_lens, total_lens, repetition, frequency, presence),
        (logits.stride(0), history.stride(0)),
        (BLOCK_L,),
    )
