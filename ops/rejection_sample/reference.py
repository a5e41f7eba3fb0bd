import functools
from typing import Any

import torch

from vllm_triton.ops.sample_tokens.philox import uniform

# Counters far from those of sample_tokens, which are numbers of tokens.
ACCEPT_FROM = 1 << 60
REPLACE_FROM = 1 << 61
# No draw may lie closer to a boundary where float32 is compared with float64 exactly.
_MARGIN = 1e-5


def rejection_sample_reference(
    out: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_start_loc: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    bonus_tokens: torch.Tensor,
    is_greedy: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    moved: float = 0.0,
) -> None:
    """Args: moved: added to every uniform number, for `outcome_is_certain`."""
    out.fill_(-1)
    starts = draft_start_loc.tolist()
    for row in range(len(bonus_tokens)):
        for index, draft in enumerate(range(starts[row], starts[row + 1])):
            token, target = int(draft_tokens[draft]), target_probs[draft]
            if is_greedy[row]:
                replacement = int(target.argmax())
                is_kept = token == replacement
            else:
                drafted = _one_hot(token, target) if draft_probs is None else draft_probs[draft]
                accept = float(uniform(seeds[row], steps[row] + (ACCEPT_FROM + index))) + moved
                is_kept = bool(accept * drafted[token] < target[token])
                replace = float(uniform(seeds[row], steps[row] + (REPLACE_FROM + index))) + moved
                replacement = _draw((target - drafted).clamp(min=0), replace)
            out[row, index] = token if is_kept else replacement
            if not is_kept:
                break
        else:
            out[row, starts[row + 1] - starts[row]] = bonus_tokens[row]


def _one_hot(token: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like).index_fill_(0, torch.tensor(token, device=like.device), 1)


def _draw(weights: torch.Tensor, draw: float) -> int:
    """The first token at which the running weight passes `draw` of the whole."""
    mass = weights.cumsum(0)
    passed = (mass > draw * mass[-1]).nonzero()
    # Rounding may let none pass; and a target equal to the draft, which is never rejected, has no weight at all.
    return int(passed[0]) if len(passed) else int(weights.nonzero()[-1]) if mass[-1] > 0 else 0


def outcome_is_certain(out: torch.Tensor, *arguments: Any) -> bool:
    """Whether slightly different draws give the same tokens. Args: those of the op."""
    results = []
    for moved in (-_MARGIN, 0.0, _MARGIN):
        results.append(torch.empty_like(out))
        functools.partial(rejection_sample_reference, moved=moved)(results[-1], *arguments)
    return torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])
