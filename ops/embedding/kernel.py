"""Embedding, one program for each block of a token's row.

y[t] = table[token_ids[t]] * scale
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.embedding.op import embedding
from vllm_triton.ops.launch import CompileCase, ceil_div, launch, rows_aligned, select_row_config, supports_triton


@triton.jit(do_not_specialize=["table_stride_v"])
def _embedding_kernel(
    token_ids_ptr,  # [T]
    table_ptr,  # [V, E]
    out_ptr,  # [T, E], contiguous
    table_stride_v,
    scale: tl.float32,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr,  # scale is not 1
    ROWS_ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + row)
    table_offset = token_id * table_stride_v
    if ROWS_ALIGNED:
        table_offset = tl.multiple_of(table_offset, 16)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    values = tl.load(table_ptr + table_offset + columns, mask=columns < E, other=0.0)
    if SCALED:
        values = values.to(tl.float32) * scale
    tl.store(out_ptr + row * E + columns, values, mask=columns < E)


COMPILE_CASES = [
    CompileCase(
        _embedding_kernel,
        {"token_ids_ptr": "*i64", "table_ptr": "*bf16", "out_ptr": "*bf16", "table_stride_v": "i32", "scale": "fp32"},
        {"E": 4096, "BLOCK_E": 1024, "SCALED": scaled, "ROWS_ALIGNED": True},
    )
    for scaled in (False, True)
]


@embedding.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_embedding(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    num_tokens, num_columns = token_ids.shape[0], table.shape[1]
    out = table.new_empty(num_tokens, num_columns)
    if out.numel() == 0:
        return out
    config = select_row_config(num_columns, table.device.type)
    grid = (num_tokens, ceil_div(num_columns, config.block))
    constants = (num_columns, config.block, scale != 1.0, rows_aligned(table))
    launch(_embedding_kernel, grid, (token_ids, table, out), (table.stride(0), scale), constants, config.num_warps)
    return out
