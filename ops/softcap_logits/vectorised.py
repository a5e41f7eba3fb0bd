"""Soft capping of logits in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.softcap_logits.op import softcap_logits


@softcap_logits.impl("torch", capture=TORCH_CALLS)
def softcap_logits_torch(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    wide = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return wide.div_(softcap).tanh_().mul_(softcap).to(logits.dtype)
