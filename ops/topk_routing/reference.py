import math

import torch


def topk_routing_reference(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_choices: int,
    use_sigmoid: bool,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = router_logits.to(torch.promote_types(router_logits.dtype, torch.float32))
    logits = torch.where(logits.isnan(), -math.inf, logits)
    # The softmax of nothing but -inf is NaN.
    scores = torch.sigmoid(logits) if use_sigmoid else torch.softmax(logits, dim=-1).nan_to_num(0.0)
    ranks = logits if correction_bias is None else scores + correction_bias
    ids = [_best(row, num_choices, num_groups, topk_groups, correction_bias is not None) for row in ranks.tolist()]
    topk_ids = torch.tensor(ids, dtype=torch.int32, device=logits.device).view(len(logits), num_choices)
    weights = scores.gather(1, topk_ids.long())
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * scaling_factor, topk_ids


def _best(ranks: list[float], num_choices: int, num_groups: int, topk_groups: int, has_bias: bool) -> list[int]:
    size = len(ranks) // num_groups
    groups = [list(range(group * size, (group + 1) * size)) for group in range(num_groups)]
    most = 2 if has_bias else 1
    group_ranks = [sum(sorted((ranks[expert] for expert in group), reverse=True)[:most]) for group in groups]
    # Python's sort keeps the order of what is equal.
    kept = sorted(range(num_groups), key=lambda group: -group_ranks[group])[:topk_groups]
    experts = sorted(expert for group in kept for expert in groups[group])
    return sorted(experts, key=lambda expert: -ranks[expert])[:num_choices]
