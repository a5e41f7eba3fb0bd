"""Sorting slots by expert in torch calls whose sizes depend on no value."""

import torch

from vllm_triton.ops.moe_align_block_size.op import moe_align_block_size, most_blocks
from vllm_triton.ops.registry import TORCH_CALLS


@moe_align_block_size.impl("torch", capture=TORCH_CALLS)
def moe_align_block_size_torch(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_slots, device = topk_ids.numel(), topk_ids.device
    num_blocks = most_blocks(num_slots, num_experts, block_size)
    experts = torch.arange(num_experts, dtype=torch.int32, device=device)
    places = experts if expert_map is None else expert_map
    # One more expert, the last, takes what is absent.
    ids = topk_ids.flatten().long()
    ids = torch.where((ids < 0) | (places[ids.clamp(min=0)] < 0), num_experts, ids)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    blocks_until = ((counts[:-1] + block_size - 1) // block_size).cumsum(0)

    sorted_ids, order = ids.sort(stable=True)
    rank = torch.arange(num_slots, device=device) - (counts.cumsum(0) - counts)[sorted_ids]
    first_block = torch.cat([blocks_until.new_zeros(1), blocks_until])
    position = torch.where(
        sorted_ids < num_experts, first_block[sorted_ids] * block_size + rank, num_blocks * block_size
    )
    sorted_slots = torch.full((num_blocks * block_size + 1,), num_slots, dtype=torch.int32, device=device)
    sorted_slots[position] = order.int()

    owner = torch.searchsorted(blocks_until, torch.arange(num_blocks, device=device), right=True)
    block_experts = torch.cat([places, places.new_full((1,), -1)])[owner]
    return sorted_slots[:-1].clone(), block_experts, (blocks_until[-1:] * block_size).int()
