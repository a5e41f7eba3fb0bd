from typing import Any

import torch

from vllm_triton.ops.contract import Dims, Scalar, Tensor
from vllm_triton.ops.moe_align_block_size.reference import moe_align_block_size_reference
from vllm_triton.ops.registry import define_op


def most_blocks(num_slots: int, num_experts: int, block_size: int) -> int:
    """How many blocks so many slots fill at most: all experts but one hold a single slot in their last block."""
    active = min(num_slots, num_experts)
    return active + (num_slots - active) // block_size


def _draw_dims(pick: Any) -> Dims:
    return {"T": pick(0, 30), "K": pick(1, 4), "X": pick(1, 20), "block_size": pick.of(1, 4, 16, 32)}


def _ids(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, dims["X"], (dims["T"], dims["K"]), generator=generator)


def expert_map(present: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """[num_experts], the numbers 0 to present - 1 in any order at any places, and -1 at the others."""
    places = torch.full((num_experts,), -1)
    places[torch.randperm(num_experts, generator=generator)[:present]] = torch.randperm(present, generator=generator)
    return places


def _map(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return expert_map(int(torch.randint(dims["X"] + 1, (), generator=generator)), dims["X"], generator)


def _derived(dims: Dims) -> Dims:
    blocks = most_blocks(dims["T"] * dims["K"], dims["X"], dims["block_size"])
    return {"Z": blocks, "C": blocks * dims["block_size"]}


@define_op(
    args={
        "topk_ids": Tensor("T K", (torch.int32,), values=_ids),
        "expert_map": Tensor("X", (torch.int32,), optional=True, values=_map),
        "num_experts": Scalar(int, "be at least 1", lambda value: value >= 1, example=8, size="X"),
        "block_size": Scalar(int, "be at least 1", lambda value: value >= 1, example=16, size="block_size"),
    },
    results={
        "sorted_slots": Tensor("C", (torch.int32,)),
        "block_experts": Tensor("Z", (torch.int32,)),
        "num_padded": Tensor("1", (torch.int32,)),
    },
    derived=_derived,
    reference=moe_align_block_size_reference,
    test_dims=_draw_dims,
    bench_dims={
        "mixtral-8x7b 1 token": {"T": 1, "K": 2, "X": 8, "block_size": 16},
        "qwen3-30b-a3b 1 token": {"T": 1, "K": 8, "X": 128, "block_size": 16},
        "qwen3-30b-a3b 512 tokens": {"T": 512, "K": 8, "X": 128, "block_size": 64},
        "qwen3-30b-a3b 8192 tokens": {"T": 8192, "K": 8, "X": 128, "block_size": 128},
    },
)
def moe_align_block_size(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts the slots of a batch by expert, so that each block of block_size slots needs the weights of one expert.

    Slot t * K + k is choice k of token t; there are fewer than 2^31. The slots of an expert follow one another in
    ascending order, and are padded to whole blocks by the number T * K, which is nobody's slot. Experts follow in the
    order of their ids. Of an expert that is absent, by its id or by the map, no slot occurs.

    Args:
        topk_ids: [T, K] int32, below num_experts; -1 for no expert.
        expert_map: [X] int32, where an expert's weights lie, -1 for absent; None: expert x at x.
        num_experts: X, at least 1.
        block_size: at least 1.
    Returns:
        sorted_slots: [C] int32, T * K beyond the last block that is used. C is Z * block_size.
        block_experts: [Z] int32, where each block's expert lies; -1 for blocks that are not used. Z is the most that
            T * K choices among X experts can need.
        num_padded: [1] int32, slots in used blocks, padding included.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    """
