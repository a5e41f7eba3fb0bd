"""Sampling in torch calls, for platforms where Triton does not run.

A sort of the vocabulary costs more than everything else together (4 ms a row of 49152 on one core), so thresholds are
sought among the most likely tokens first.
"""

import torch

from vllm_triton.ops.registry import HOST_READS
from vllm_triton.ops.sample_tokens.op import sample_tokens
from vllm_triton.ops.sample_tokens.philox import uniform
from vllm_triton.ops.sample_tokens.reference import GREEDY_BELOW, without_nan

# How many of the most likely tokens are looked at, in turn, before the whole vocabulary is: for one row of 49152 on one
# core topk takes 0.1 ms for 256 and 0.8 ms for 4096.
CANDIDATES = (256, 4096)


@sample_tokens.impl("torch", capture=HOST_READS)
def sample_tokens_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    if logits.shape[0] == 0:
        return torch.empty_like(seeds)
    logits = logits.float()
    peaks = logits.amax(dim=-1)
    if not peaks.isfinite().all():
        logits = without_nan(logits)
        peaks = logits.amax(dim=-1)
    random = (temperature >= GREEDY_BELOW) & (peaks > float("-inf"))
    if random.all():
        return _draw(logits, peaks, temperature, min_p, top_k, top_p, uniform(seeds, steps))
    tokens = logits.argmax(dim=-1)
    rows = random.nonzero().squeeze(1)
    if len(rows) > 0:
        arguments = (logits, peaks, temperature, min_p, top_k, top_p, uniform(seeds, steps))
        tokens[rows] = _draw(*(argument[rows] for argument in arguments))
    return tokens


def _draw(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    weights = logits.sub(peaks[:, None]).div_(temperature[:, None]).exp_()
    if (min_p > 0).any():
        weights.masked_fill_(weights < min_p[:, None], 0)
    limited = (top_k > 0) & (top_k < logits.shape[1])
    restricted = limited | (top_p < 1)
    if restricted.any():
        top_k = torch.where(limited, top_k, 0).long()
        floors = _floors(logits, weights, top_k, top_p, restricted.nonzero().squeeze(1))
        weights.masked_fill_(logits < floors[:, None], 0)
    mass = _running_mass(weights)
    return torch.searchsorted(mass, draws[:, None] * mass[:, -1:], right=True).squeeze(1)


def _running_mass(weights: torch.Tensor) -> torch.Tensor:
    """Sums along each row. cumsum adds in order and so whatever the batch is; a sum may split a row over threads."""
    return weights.cumsum(dim=-1)


def _floors(
    logits: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """[B]: each row's lowest logit that top_k (0 for all) and then top_p keep; minus infinity outside `rows`."""
    floors = torch.full_like(top_p, float("-inf"))
    for count in _candidate_counts(top_k[rows], logits.shape[1]):
        limits, shares = top_k[rows][:, None], top_p[rows][:, None]
        largest, tokens = logits.index_select(0, rows).topk(count, dim=-1)
        kth_largest = largest.gather(1, limits.clamp(1, count) - 1).masked_fill_(limits == 0, float("-inf"))
        row_weights = weights.index_select(0, rows)
        mass = row_weights.gather(1, tokens).masked_fill_(largest < kth_largest, 0).cumsum(dim=-1)
        total = torch.where(limits > 0, mass[:, -1:], _running_mass(row_weights)[:, -1:])
        # Of equal logits the first has the mass above them all, so the group is kept if it is.
        above = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        num_kept = (above < shares * total).sum(dim=-1, keepdim=True).clamp_(min=1)
        # Logits equal to the k-th largest may go on beyond the candidates, and so may what top_p keeps.
        complete = torch.where(limits > 0, largest[:, -1:] < kth_largest, mass[:, -1:] >= shares * total).squeeze(1)
        if count == logits.shape[1]:
            complete.fill_(True)
        floors[rows[complete]] = largest.gather(1, num_kept - 1).squeeze(1)[complete]
        rows = rows[~complete]
        if len(rows) == 0:
            break
    return floors


def _candidate_counts(top_k: torch.Tensor, vocabulary: int) -> list[int]:
    """How many of the most likely tokens to look at, in turn; one more than the k-th shows where its equals end."""
    counts = (int(top_k.max()) + 1,) if (top_k > 0).all() else CANDIDATES
    return [count for count in counts if count < vocabulary] + [vocabulary]
