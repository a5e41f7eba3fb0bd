"""Log-probability and rank of one token, one program a row; float32 throughout.

Each lane keeps a maximum and a sum of its own over the blocks of the row; they are merged at the end.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax".
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, supports_triton
from vllm_triton.ops.sample_tokens.kernel import select_config
from vllm_triton.ops.token_logprobs.op import token_logprobs


@triton.jit(
    do_not_specialize=["logits_stride_b"],
    do_not_specialize_on_alignment=["token_ids_ptr", "logprobs_ptr", "ranks_ptr", "lse_ptr"],
)
def _token_logprobs_kernel(
    logits_ptr,  # [B, V]
    token_ids_ptr,  # [B]
    logprobs_ptr,  # [B]
    ranks_ptr,  # [B]
    lse_ptr,  # [B]
    logits_stride_b,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """lse = log sum exp(logits), logprob = logits[token] - lse, rank = 1 + #(logits > logits[token]).

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax".
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_b
    own = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    # Finite, so that the difference of two of them is no NaN.
    highest = tl.full([BLOCK_V], -3.0e38, tl.float32)
    mass = tl.zeros([BLOCK_V], tl.float32)
    greater = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, V, BLOCK_V):
        tokens = start + tl.arange(0, BLOCK_V)
        logits = tl.load(row_ptr + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
        greater += (logits > own).to(tl.int32)
        new_highest = tl.maximum(highest, logits)
        mass = mass * tl.exp(highest - new_highest) + tl.exp(logits - new_highest)
        highest = new_highest
    peak = tl.max(highest, axis=0)
    lse = peak + tl.log(tl.sum(mass * tl.exp(highest - peak), axis=0))
    tl.store(logprobs_ptr + row, own - lse)
    tl.store(ranks_ptr + row, (tl.sum(greater, axis=0) + 1).to(tl.int64))
    tl.store(lse_ptr + row, lse)


COMPILE_CASES = [
    CompileCase(
        _token_logprobs_kernel,
        {"logits_ptr": "*fp32", "token_ids_ptr": "*i64", "logprobs_ptr": "*fp32", "ranks_ptr": "*i64"}
        | {"lse_ptr": "*fp32", "logits_stride_b": "i32"},
        {"V": 49152, "BLOCK_V": select_config(49152, "cuda").block_v},
        num_warps=select_config(49152, "cuda").num_warps,
    )
]


@token_logprobs.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, vocabulary = logits.shape
    logprobs, lse = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    ranks = torch.empty_like(token_ids)
    if num_rows > 0:
        config = select_config(vocabulary, logits.device.type)
        tensors = (logits, token_ids, logprobs, ranks, lse)
        constants = (vocabulary, config.block_v)
        launch(_token_logprobs_kernel, (num_rows,), tensors, (logits.stride(0),), constants, config.num_warps)
    return logprobs, ranks, lse
