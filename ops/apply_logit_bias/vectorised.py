"""Logit bias in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.apply_logit_bias.op import apply_logit_bias
from vllm_triton.ops.registry import TORCH_CALLS


@apply_logit_bias.impl("torch", capture=TORCH_CALLS)
def apply_logit_bias_torch(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    real = rows >= 0
    logits.index_put_((rows[real], token_ids[real]), bias[real], accumulate=True)
