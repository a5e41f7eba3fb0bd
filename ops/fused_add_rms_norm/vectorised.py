"""Residual addition and RMSNorm in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.fused_add_rms_norm.op import fused_add_rms_norm


@fused_add_rms_norm.impl("torch")
def fused_add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual_out = x + residual
    return torch.nn.functional.rms_norm(residual_out, weight.shape, weight, eps), residual_out
