"""The experts one after another, each unpacked for this call; the host reads which of them have tokens."""

import torch

from vllm_triton.ops.fused_moe.vectorised import chosen_experts
from vllm_triton.ops.fused_moe_w4a16.op import fused_moe_w4a16
from vllm_triton.ops.fused_moe_w4a16.reference import expert_weight, swiglu_by_turns
from vllm_triton.ops.registry import HOST_READS


@fused_moe_w4a16.impl("torch", capture=HOST_READS)
def fused_moe_w4a16_torch(
    x: torch.Tensor,
    w1_quants: torch.Tensor,
    w1_scales: torch.Tensor,
    w1_zeros: torch.Tensor | None,
    w2_quants: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_zeros: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    for place, tokens, slots in chosen_experts(topk_ids, expert_map, w1_quants.shape[0]):
        w1 = expert_weight(w1_quants, w1_scales, w1_zeros, place, torch.float32)
        w2 = expert_weight(w2_quants, w2_scales, w2_zeros, place, torch.float32)
        activation = swiglu_by_turns(x[tokens].float() @ w1.T).to(x.dtype)
        out.index_add_(0, tokens, activation.float() @ w2.T * topk_weights.flatten()[slots, None])
    return out.to(x.dtype)
