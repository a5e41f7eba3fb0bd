import torch

from vllm_triton.ops.silu_and_mul.reference import silu_and_mul_reference

# Of gpt-oss: how steep the sigmoid is.
SWIGLU_ALPHA = 1.702


def fused_moe_reference(
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
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=wide)
    for expert in topk_ids.unique().tolist():
        place = -1 if expert < 0 else expert if expert_map is None else int(expert_map[expert])
        if place < 0:
            continue
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate_up = x[tokens].to(wide) @ w1[place].to(wide).T
        if w1_bias is not None:
            gate_up = gate_up + w1_bias[place].to(wide)
        activation = swiglu_reference(gate_up, swiglu_limit).to(x.dtype)
        result = activation.to(wide) @ w2[place].to(wide).T
        if w2_bias is not None:
            result = result + w2_bias[place].to(wide)
        result = result * topk_weights[tokens, choices, None].to(wide)
        out.index_add_(0, tokens, result.to(x.dtype).to(wide))
    return out.to(x.dtype)


def swiglu_reference(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """[..., 2*I] -> [..., I]: silu_and_mul, or with a limit the activation of gpt-oss."""
    if limit == 0:
        return silu_and_mul_reference(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
