import torch

from vllm_triton.ops.rms_norm.reference import rms_norm_reference


def fused_add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual_out = x + residual
    return rms_norm_reference(residual_out, weight, eps), residual_out
