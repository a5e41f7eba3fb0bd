"""Embedding from a packed table, one program for each token: a tile of one row is unpacked at a time."""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.gguf_embedding.op import gguf_embedding
from vllm_triton.ops.gguf_mm.layout import FORMATS, format_of
from vllm_triton.ops.gguf_mm.unpacking import unpacked
from vllm_triton.ops.launch import CompileCase, launch, supports_triton

_STRIDES = ["out_stride_t", "quants_stride_j", "quants_stride_w", "scales_stride_j", "scales_stride_s"]


@triton.jit(do_not_specialize=["K", *_STRIDES])
def _gguf_embedding_kernel(
    out_ptr,  # [T, K]
    token_ids_ptr,  # [T]
    quants_ptr,  # [J, W, 32]
    scales_ptr,  # [J, S, 32]
    out_stride_t,
    quants_stride_j,
    quants_stride_w,
    scales_stride_j,
    scales_stride_s,
    K,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides K
):
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + token)
    row = token_id % 32 + tl.arange(0, 1)
    quants_ptrs = quants_ptr + token_id // 32 * quants_stride_j + row
    scales_ptrs = scales_ptr + token_id // 32 * scales_stride_j + row
    out_ptrs = out_ptr + token * out_stride_t + tl.arange(0, BLOCK_K)
    for start in range(0, K, BLOCK_K):
        values = unpacked(
            quants_ptrs, scales_ptrs, start, quants_stride_w, scales_stride_s, FORMAT, BLOCK_K, tl.float32
        )
        tl.store(out_ptrs + start, tl.reshape(values, [BLOCK_K]))


# Of a tile.
MOST_INPUTS = 128


COMPILE_CASES = [
    CompileCase(
        _gguf_embedding_kernel,
        {"out_ptr": "*bf16", "token_ids_ptr": "*i64", "quants_ptr": "*i32", "scales_ptr": "*i16", "K": "i32"}
        | dict.fromkeys(_STRIDES, "i32"),
        {"FORMAT": name, "BLOCK_K": MOST_INPUTS},
        num_warps=1,
    )
    for name in FORMATS
]


@gguf_embedding.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_gguf_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor
) -> None:
    num_tokens, depth = out.shape
    if num_tokens == 0:
        return
    layout = format_of(depth, quants.shape[1], scales.shape[1])
    assert layout is not None, "the contract admits known formats alone"
    numbers = (out.stride(0), *quants.stride()[:2], *scales.stride()[:2], depth)
    constants = (layout.name, min(depth & -depth, MOST_INPUTS))  # the largest power of two that divides the depth
    launch(_gguf_embedding_kernel, (num_tokens,), (out, token_ids, quants, scales), numbers, constants, num_warps=1)
