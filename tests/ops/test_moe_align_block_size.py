"""Slots sorted by expert, in blocks of one expert each."""

import pytest
import torch

from vllm_triton.ops import moe_align_block_size
from vllm_triton.ops.errors import ShapeError
from vllm_triton.ops.moe_align_block_size.op import most_blocks

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(moe_align_block_size.implementations))


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("expert_map", "slots", "experts", "num_padded"),
    [
        (None, [[1, 3], [0, 5], [4, 6]], [0, 1, 3], 6),
        ([1, -1, 7, 0], [[1, 3], [4, 6]], [1, 0], 4),
        ([-1, -1, -1, -1], [], [], 0),
    ],
)
def test_an_example(implementation, expert_map, slots, experts, num_padded):
    """Three tokens: slots 0 to 5, of which 2 is nobody's; 6 is padding."""
    ids = torch.tensor([[1, 0], [-1, 0], [3, 1]], dtype=torch.int32)
    expert_map = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32)
    sorted_slots, block_experts, padded = moe_align_block_size.implementations[implementation](ids, expert_map, 4, 2)
    assert most_blocks(6, 4, 2) == 5 == len(block_experts)
    assert sorted_slots.view(-1, 2).tolist() == slots + [[6, 6]] * (5 - len(slots))
    assert block_experts.tolist() == experts + [-1] * (5 - len(experts))
    assert padded.tolist() == [num_padded]


@IMPLEMENTATIONS
def test_more_slots_than_one_chunk(implementation):
    ids = torch.randint(0, 5, (700, 4), dtype=torch.int32)
    sorted_slots, block_experts, _ = moe_align_block_size.implementations[implementation](ids, None, 5, 16)
    flat = torch.cat([ids.flatten(), torch.tensor([-2], dtype=torch.int32)])
    owners = flat[sorted_slots.long()].view(-1, 16)
    assert ((owners == block_experts[:, None]) | (owners == -2)).all()
    real = sorted_slots[sorted_slots < 2800]
    assert real.sort().values.tolist() == list(range(2800))


@pytest.mark.parametrize(("num_slots", "num_experts", "block_size"), [(0, 3, 4), (5, 3, 2), (9, 4, 4), (3, 9, 16)])
def test_most_blocks_is_reached_and_not_passed(num_slots, num_experts, block_size):
    """Over all ways to share the slots out."""

    def shares(left, experts):
        if experts == 1:
            yield (left,)
            return
        for first in range(left + 1):
            yield from ((first, *others) for others in shares(left - first, experts - 1))

    needed = (sum(-(-count // block_size) for count in share) for share in shares(num_slots, num_experts))
    assert max(needed) == most_blocks(num_slots, num_experts, block_size)


def test_a_map_of_another_size_is_refused():
    ids, expert_map = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"num_experts must be X = 5, got 4"):
        moe_align_block_size(ids, expert_map, 4, 16)
