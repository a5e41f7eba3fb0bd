import torch

from vllm_triton.ops.fused_moe.reference import present_experts
from vllm_triton.ops.w4a16_mm.layout import dequantize


def fused_moe_w4a16_reference(
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
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=wide)
    for place, tokens, choices in present_experts(topk_ids, expert_map):
        w1 = expert_weight(w1_quants, w1_scales, w1_zeros, place, wide)
        w2 = expert_weight(w2_quants, w2_scales, w2_zeros, place, wide)
        activation = swiglu_by_turns(x[tokens].to(wide) @ w1.T).to(x.dtype)
        result = activation.to(wide) @ w2.T * topk_weights[tokens, choices, None].to(wide)
        out.index_add_(0, tokens, result.to(x.dtype).to(wide))
    return out.to(x.dtype)


def expert_weight(
    quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, place: int, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix [16*J, K] of the expert that lies at this place."""
    return dequantize(quants[place], scales[place], None if zeros is None else zeros[place], dtype)


def swiglu_by_turns(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2*I], columns of gate and up by turns -> [..., I]."""
    return torch.nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]
