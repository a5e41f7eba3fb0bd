"""RMSNorm in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.rms_norm.op import rms_norm


@rms_norm.impl("torch")
def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
