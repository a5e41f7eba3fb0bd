import torch

from vllm_triton.ops.silu_and_mul.reference import silu_and_mul_reference


def fused_moe_reference(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=wide)
    for expert in topk_ids.unique().tolist():
        place = -1 if expert < 0 else expert if expert_map is None else int(expert_map[expert])
        if place < 0:
            continue
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        activation = silu_and_mul_reference(x[tokens].to(wide) @ w1[place].to(wide).T).to(x.dtype)
        result = activation.to(wide) @ w2[place].to(wide).T * topk_weights[tokens, choices, None].to(wide)
        out.index_add_(0, tokens, result.to(x.dtype).to(wide))
    return out.to(x.dtype)
