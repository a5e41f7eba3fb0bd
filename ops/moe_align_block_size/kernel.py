"""Slots sorted by expert, one program for each expert: it counts its slots, and in a second launch places them.

Every program reads all ids, in order, so that no atomics are needed and the order of slots is always the same. At 16384
slots and 128 experts both launches together take a thousandth of the products that they prepare.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, next_power_of_2, supports_triton
from vllm_triton.ops.moe_align_block_size.op import moe_align_block_size, most_blocks

LARGEST_CHUNK = 1024


@triton.jit
def _is_absent(map_ptr, expert):
    if map_ptr is None:
        return False
    else:
        return tl.load(map_ptr + expert) < 0


@triton.jit
def _load_ids(ids_ptr, slots, num_slots, ids_stride_t, K: tl.constexpr):
    """The experts of these slots, -1 for slots beyond the last."""
    offsets = (slots // K).to(tl.int64) * ids_stride_t + slots % K
    return tl.load(ids_ptr + offsets, mask=slots < num_slots, other=-1)


@triton.jit(do_not_specialize=["num_slots", "ids_stride_t"])
def _count_slots_kernel(
    ids_ptr,  # [T, K]
    map_ptr,  # [X], or None
    counts_ptr,  # [X]
    num_slots,
    ids_stride_t,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    expert = tl.program_id(0)
    if _is_absent(map_ptr, expert):
        tl.store(counts_ptr + expert, 0)
        return
    lanes = tl.arange(0, CHUNK)
    counts = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, num_slots, CHUNK):
        counts += (_load_ids(ids_ptr, start + lanes, num_slots, ids_stride_t, K) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(counts, axis=0))


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "ids_stride_t"])
def _place_slots_kernel(
    ids_ptr,  # [T, K]
    map_ptr,  # [X], or None
    counts_ptr,  # [X]
    sorted_slots_ptr,  # [Z * BLOCK]
    block_experts_ptr,  # [Z]
    num_padded_ptr,  # [1]
    num_slots,
    num_blocks,
    ids_stride_t,
    K: tl.constexpr,
    X: tl.constexpr,
    BLOCK: tl.constexpr,  # slots of a block
    CHUNK: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_S: tl.constexpr,  # a power of two, at least BLOCK
):
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_X)
    blocks = tl.cdiv(tl.load(counts_ptr + experts, mask=experts < X, other=0), BLOCK)
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    num_used = tl.sum(blocks, axis=0)
    padding = tl.arange(0, BLOCK_S)

    if expert == 0:
        tl.store(num_padded_ptr, num_used * BLOCK)
    # Blocks that are not used, shared among all programs.
    for block in range(num_used + expert, num_blocks, X):
        tl.store(block_experts_ptr + block, -1)
        slots_ptrs = sorted_slots_ptr + block * BLOCK + padding
        tl.store(slots_ptrs, tl.zeros([BLOCK_S], dtype=tl.int32) + num_slots, mask=padding < BLOCK)

    count = tl.load(counts_ptr + expert)
    if count == 0:
        return
    place = expert if map_ptr is None else tl.load(map_ptr + expert)
    for block in range(first_block, first_block + tl.cdiv(count, BLOCK)):
        tl.store(block_experts_ptr + block, place)
    own_ptr = sorted_slots_ptr + first_block * BLOCK
    lanes = tl.arange(0, CHUNK)
    num_placed = 0
    for start in range(0, num_slots, CHUNK):
        slots = start + lanes
        is_own = _load_ids(ids_ptr, slots, num_slots, ids_stride_t, K) == expert
        number = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(own_ptr + num_placed + number - 1, slots, mask=is_own)
        num_placed += tl.sum(is_own.to(tl.int32), axis=0)
    is_padding = padding < tl.cdiv(count, BLOCK) * BLOCK - count
    tl.store(own_ptr + count + padding, tl.zeros([BLOCK_S], dtype=tl.int32) + num_slots, mask=is_padding)


@dataclass(frozen=True)
class MoeAlignConfig:
    chunk: int
    num_warps: int = 4


@functools.cache
def select_config(num_tokens: int, num_choices: int) -> MoeAlignConfig:
    """The same for all numbers of tokens up to a power of two: kernels differ by no more than that."""
    return MoeAlignConfig(min(next_power_of_2(next_power_of_2(num_tokens) * num_choices), LARGEST_CHUNK))


_POINTERS = {"ids_ptr": "*i32", "map_ptr": "*i32", "counts_ptr": "*i32"}
_RESULTS = {"sorted_slots_ptr": "*i32", "block_experts_ptr": "*i32", "num_padded_ptr": "*i32"}
_NUMBERS = {"num_slots": "i32", "ids_stride_t": "i32"}

COMPILE_CASES = [
    CompileCase(_count_slots_kernel, _POINTERS | _NUMBERS, {"K": 8, "CHUNK": 1024}),
    CompileCase(
        _place_slots_kernel,
        _POINTERS | _RESULTS | _NUMBERS | {"num_blocks": "i32"},
        {"K": 8, "X": 128, "BLOCK": 64, "CHUNK": 1024, "BLOCK_X": 128, "BLOCK_S": 64},
    ),
]


@moe_align_block_size.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_moe_align_block_size(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, num_choices = topk_ids.shape
    num_slots = num_tokens * num_choices
    num_blocks = most_blocks(num_slots, num_experts, block_size)
    sorted_slots = topk_ids.new_empty(num_blocks * block_size)
    block_experts = topk_ids.new_empty(num_blocks)
    num_padded = topk_ids.new_empty(1)
    counts = topk_ids.new_empty(num_experts)
    config = select_config(num_tokens, num_choices)
    launch(
        _count_slots_kernel,
        (num_experts,),
        (topk_ids, expert_map, counts),
        (num_slots, topk_ids.stride(0)),
        (num_choices, config.chunk),
        config.num_warps,
    )
    launch(
        _place_slots_kernel,
        (num_experts,),
        (topk_ids, expert_map, counts, sorted_slots, block_experts, num_padded),
        (num_slots, num_blocks, topk_ids.stride(0)),
        (
            num_choices,
            num_experts,
            block_size,
            config.chunk,
            next_power_of_2(num_experts),
            next_power_of_2(block_size),
        ),
        config.num_warps,
    )
    return sorted_slots, block_experts, num_padded
