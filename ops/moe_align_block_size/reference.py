import functools

import torch


def moe_align_block_size_reference(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots_of: list[list[int]] = [[] for _ in range(num_experts)]
    num_slots = topk_ids.numel()
    for slot, expert in enumerate(topk_ids.flatten().tolist()):
        if expert >= 0:
            slots_of[expert].append(slot)
    places = list(range(num_experts)) if expert_map is None else expert_map.tolist()
    sorted_slots: list[int] = []
    block_experts: list[int] = []
    for place, slots in zip(places, slots_of, strict=True):
        if place >= 0 and slots:
            padded = slots + [num_slots] * (-len(slots) % block_size)
            sorted_slots += padded
            block_experts += [place] * (len(padded) // block_size)
    num_padded = len(sorted_slots)
    active = min(num_slots, num_experts)
    unused = active + (num_slots - active) // block_size - len(block_experts)
    sorted_slots += [num_slots] * (unused * block_size)
    block_experts += [-1] * unused
    integers = functools.partial(torch.tensor, dtype=torch.int32, device=topk_ids.device)
    return integers(sorted_slots), integers(block_experts), integers([num_padded])
