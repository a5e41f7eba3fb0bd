"""Layer normalisation in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.layer_norm.op import layer_norm
from vllm_triton.ops.registry import TORCH_CALLS


@layer_norm.impl("torch", capture=TORCH_CALLS)
def layer_norm_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.contiguous(), weight.shape, weight, bias, eps)
