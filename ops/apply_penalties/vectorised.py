"""Penalties in torch calls, for platforms where Triton does not run: only the logits of seen tokens are touched."""

import torch

from vllm_triton.ops.apply_penalties.op import apply_penalties
from vllm_triton.ops.registry import HOST_READS


@apply_penalties.impl("torch", capture=HOST_READS)
def apply_penalties_torch(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    penalised = ((repetition != 1) | (frequency != 0) | (presence != 0)) & (total_lens > 0)
    rows = penalised.nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    totals = total_lens[rows][:, None]
    longest = int(totals.max())
    positions = torch.arange(longest, device=logits.device)[None, :]
    tokens = history[rows, :longest].long()
    # Positions beyond a row's end repeat its first token: they write the same value to the same place.
    tokens = torch.where(positions < totals, tokens, tokens[:, :1])
    in_output = (positions >= prompt_lens[rows][:, None]) & (positions < totals)

    counts = logits.new_zeros(len(rows), logits.shape[1])
    counts.scatter_add_(1, tokens, in_output.float())
    counts = counts.gather(1, tokens)
    seen = logits[rows[:, None], tokens]
    factor = repetition[rows][:, None]
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    seen -= frequency[rows][:, None] * counts + presence[rows][:, None] * (counts > 0)
    logits[rows[:, None], tokens] = seen
