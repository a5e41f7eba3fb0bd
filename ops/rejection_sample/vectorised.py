"""Rejection sampling in torch calls, for platforms where Triton does not run: all drafts at once, then the first no."""

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.rejection_sample.op import rejection_sample
from vllm_triton.ops.rejection_sample.reference import ACCEPT_FROM, REPLACE_FROM
from vllm_triton.ops.sample_tokens.philox import uniform


@rejection_sample.impl("torch", capture=TORCH_CALLS)
def rejection_sample_torch(
    out: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_start_loc: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    bonus_tokens: torch.Tensor,
    is_greedy: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> None:
    num_rows, most = out.shape[0], out.shape[1] - 1
    starts, ends = draft_start_loc[:-1].long(), draft_start_loc[1:].long()
    index = torch.arange(len(draft_tokens), device=out.device)
    row = torch.searchsorted(ends, index, right=True).clamp_(max=num_rows - 1)
    # Drafts that are padding go into a column that is dropped.
    within = torch.where(index < ends[-1], index - starts[row], most + 1)
    own = draft_tokens[:, None]
    of_target = target_probs.gather(1, own)[:, 0]
    if draft_probs is None:
        of_draft, left = torch.ones_like(of_target), target_probs.scatter(1, own, 0)
    else:
        of_draft, left = draft_probs.gather(1, own)[:, 0], (target_probs - draft_probs).clamp_(min=0)
    accept = uniform(seeds[row], steps[row] + (ACCEPT_FROM + within))
    replace = uniform(seeds[row], steps[row] + (REPLACE_FROM + within))
    mass = left.cumsum(dim=-1)
    drawn = torch.searchsorted(mass, replace[:, None] * mass[:, -1:], right=True)[:, 0]
    last = (left > 0).long().mul_(torch.arange(left.shape[1], device=out.device)).amax(dim=-1)
    best = target_probs.argmax(dim=-1)
    replacement = torch.where(is_greedy[row], best, torch.minimum(drawn, last))
    is_kept = torch.where(is_greedy[row], draft_tokens == best, accept * of_draft < of_target)

    # One table with the bonus behind each row's drafts; what follows the first no is -1.
    tokens = out.new_full((num_rows, most + 2), -1)
    tokens.index_put_((row, within), torch.where(is_kept, draft_tokens, replacement))
    tokens.scatter_(1, (ends - starts)[:, None], bonus_tokens[:, None])
    goes_on = torch.ones_like(tokens, dtype=torch.bool).index_put_((row, within), is_kept)
    is_written = torch.nn.functional.pad(goes_on[:, :most].cumprod(dim=1).bool(), (1, 0), value=True)
    out.copy_(tokens[:, : most + 1].masked_fill_(~is_written, -1))
