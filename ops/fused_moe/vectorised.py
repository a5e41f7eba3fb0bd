"""The experts one after another, by torch's own products; the host reads which of them have tokens."""

import torch

from vllm_triton.ops.fused_moe.op import fused_moe
from vllm_triton.ops.fused_moe.reference import SWIGLU_ALPHA
from vllm_triton.ops.registry import HOST_READS


@fused_moe.impl("torch", capture=HOST_READS)
def fused_moe_torch(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> torch.Tensor:
    num_experts, num_choices = w1.shape[0], topk_ids.shape[1]
    places = topk_ids.long()
    if expert_map is not None:
        places = torch.where(places < 0, -1, expert_map[places.clamp(min=0)])
    order = places.flatten().argsort(stable=True)
    counts = torch.bincount(places.flatten() + 1, minlength=num_experts + 1).tolist()
    out = torch.zeros_like(x, dtype=torch.float32)
    for place, slots in enumerate(order.split(counts), start=-1):
        if place < 0 or len(slots) == 0:
            continue
        tokens = slots // num_choices
        gate_up = torch.nn.functional.linear(x[tokens], w1[place], None if w1_bias is None else w1_bias[place])
        activation = _swiglu(gate_up, swiglu_limit)
        result = torch.nn.functional.linear(activation, w2[place], None if w2_bias is None else w2_bias[place])
        out.index_add_(0, tokens, result * topk_weights.flatten()[slots, None])
    return out.to(x.dtype)


def _swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit == 0:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
