"""Routing in torch calls, for platforms where Triton does not run. Stable sorts put the lower of equal ids first."""

import math

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.topk_routing.op import topk_routing


@topk_routing.impl("torch", capture=TORCH_CALLS)
def topk_routing_torch(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_choices: int,
    use_sigmoid: bool,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = router_logits.float().nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf)
    scores = logits.sigmoid() if use_sigmoid else logits.softmax(dim=-1).nan_to_num(0.0)
    ranks = logits if correction_bias is None else scores + correction_bias
    if topk_groups < num_groups:
        grouped = ranks.unflatten(1, (num_groups, -1))
        most = min(2 if correction_bias is not None else 1, grouped.shape[2])
        group_ranks = grouped.topk(most, dim=-1).values.sum(dim=-1)
        kept = group_ranks.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        is_left_out = torch.ones_like(group_ranks, dtype=torch.bool).scatter_(1, kept, False)
        # An expert that may be chosen ranks above all that may not.
        lowest = torch.finfo(torch.float32).min
        ranks = grouped.clamp(min=lowest).masked_fill(is_left_out[..., None], -math.inf).flatten(1)
    topk_ids = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :num_choices]
    weights = scores.gather(1, topk_ids)
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * scaling_factor, topk_ids.to(torch.int32, memory_format=torch.contiguous_format)
