"""Residual addition and RMSNorm in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.fused_add_rms_norm.op import fused_add_rms_norm
from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.rms_norm.vectorised import rms_norm_torch


@fused_add_rms_norm.impl("torch", capture=TORCH_CALLS)
def fused_add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual_out = x + residual
    return rms_norm_torch(residual_out, weight, eps), residual_out
