"""What kernels of experts have in common: which slots a program computes, and what it does with their products."""

import triton
import triton.language as tl

from vllm_triton.ops.fused_moe.product import row_offsets
from vllm_triton.ops.fused_moe.reference import SWIGLU_ALPHA

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_SWIGLU_ALPHA = tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def block_and_tile(program, num_blocks, num_tiles, GROUP: tl.constexpr):
    """Blocks in groups, tile by tile: blocks of one expert follow each other on the same tile of its weight."""
    first = program // (GROUP * num_tiles) * GROUP
    group_size = min(num_blocks - first, GROUP)
    within = program % (GROUP * num_tiles)
    return first + within % group_size, within // group_size


@triton.jit
def slots_of_block(sorted_slots_ptr, block, BLOCK_T: tl.constexpr):
    """[BLOCK_T]; the last ones may be none, from the number of slots on."""
    return tl.load(sorted_slots_ptr + block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))


@triton.jit
def _swiglu(gate, up, LIMIT: tl.constexpr):
    """silu_and_mul, or with a limit the activation of gpt-oss."""
    if LIMIT == 0:
        return gate / (1.0 + tl.exp2(gate * MINUS_LOG2_E)) * up
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp2(gate * (_SWIGLU_ALPHA * MINUS_LOG2_E))) * (up + 1.0)


@triton.jit
def store_activation(
    activation_ptr,  # [slots, I], contiguous
    gate_up,  # [BLOCK_T, 2 * BLOCK_N]: columns of gate and up by turns
    slots,  # [BLOCK_T]
    is_slot,  # [BLOCK_T]
    tile,
    I,  # noqa: E741  (the glossary's name)
    LIMIT: tl.constexpr,
):
    BLOCK_N: tl.constexpr = gate_up.shape[1] // 2
    gate, up = tl.split(tl.reshape(gate_up, [gate_up.shape[0], BLOCK_N, 2]))
    activation = _swiglu(gate, up, LIMIT)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = activation_ptr + (slots.to(tl.int64) * I)[:, None] + columns[None, :]
    tl.store(out_ptrs, activation, mask=is_slot[:, None] & (columns < I)[None, :])


@triton.jit
def store_result(
    result_ptr,  # [slots, E], contiguous
    topk_weights_ptr,  # [T, K]
    weights_stride_t,
    total,  # [BLOCK_T, columns]
    slots,  # [BLOCK_T]
    is_slot,  # [BLOCK_T]
    columns,
    E,
    K: tl.constexpr,
):
    routing_ptrs = topk_weights_ptr + row_offsets(slots // K, weights_stride_t, False) + slots % K
    routing = tl.load(routing_ptrs, mask=is_slot, other=0.0)
    out_ptrs = result_ptr + (slots.to(tl.int64) * E)[:, None] + columns[None, :]
    tl.store(out_ptrs, total * routing[:, None], mask=is_slot[:, None] & (columns < E)[None, :])
