"""The sum over a token's experts in torch calls."""

import torch

from vllm_triton.ops.moe_sum.op import moe_sum
from vllm_triton.ops.registry import TORCH_CALLS


@moe_sum.impl("torch", capture=TORCH_CALLS)
def moe_sum_torch(x: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    is_present = topk_ids >= 0
    if expert_map is not None:
        is_present &= expert_map[topk_ids.clamp(min=0).long()] >= 0
    return torch.where(is_present[..., None], x, 0).sum(dim=1, dtype=torch.float32).to(x.dtype)
