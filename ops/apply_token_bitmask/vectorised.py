"""Forbidding tokens in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.apply_token_bitmask.op import apply_token_bitmask
from vllm_triton.ops.registry import TORCH_CALLS


@apply_token_bitmask.impl("torch", capture=TORCH_CALLS)
def apply_token_bitmask_torch(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    real = rows >= 0
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[real][:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows[real]] = logits[rows[real]].masked_fill_(allowed == 0, float("-inf"))
