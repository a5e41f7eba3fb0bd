import torch

from vllm_triton.ops.sample_tokens.philox import uniform

# Below this temperature a row is greedy: dividing by it would overflow. A float32, so that all precisions agree on it.
GREEDY_BELOW = torch.tensor(1e-5, dtype=torch.float32).item()


def sample_tokens_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = torch.zeros_like(seeds)
    draws = uniform(seeds, steps)
    for row, row_logits in enumerate(logits):
        tokens[row] = sample_row(
            row_logits, float(temperature[row]), float(min_p[row]), int(top_k[row]), float(top_p[row]), draws[row]
        )
    return tokens


def sample_row(
    logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float, draw: torch.Tensor
) -> int:
    """The token of one row [V] for the uniform number `draw`."""
    logits = without_nan(logits)
    peak = logits.max()
    if temperature < GREEDY_BELOW or peak == float("-inf"):
        return int((logits == peak).nonzero()[0])
    weights = ((logits - peak) / temperature).exp()  # proportional to the probabilities, 1 for the most likely token
    kept = weights >= min_p
    if 0 < top_k < len(logits):
        kept &= logits >= logits.topk(top_k).values[-1]
    if top_p < 1:
        weights = weights * kept
        kept &= _mass_above(logits, weights) < top_p * weights.sum()
    mass = (weights * kept).cumsum(0)
    return int((mass > draw.to(mass.dtype) * mass[-1]).nonzero()[0])


def without_nan(logits: torch.Tensor) -> torch.Tensor:
    """NaN becomes minus infinity, which is never drawn, and infinity the largest number."""
    return logits.nan_to_num(nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf"))


def _mass_above(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each token, the summed weight of the tokens with strictly greater logits."""
    values, which = logits.unique(return_inverse=True)  # ascending
    mass = weights.new_zeros(len(values)).index_add(0, which, weights)
    return (mass.flip(0).cumsum(0).flip(0) - mass)[which]
