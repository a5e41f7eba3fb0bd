import torch


def moe_sum_reference(x: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    out = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.promote_types(x.dtype, torch.float32))
    for token, experts in enumerate(topk_ids.tolist()):
        for choice, expert in enumerate(experts):
            if expert >= 0 and (expert_map is None or expert_map[expert] >= 0):
                out[token] += x[token, choice]
    return out.to(x.dtype)
