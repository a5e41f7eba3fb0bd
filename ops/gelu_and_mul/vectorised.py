"""GELU and multiplication in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.gelu_and_mul.op import gelu_and_mul
from vllm_triton.ops.registry import TORCH_CALLS


@gelu_and_mul.impl("torch", capture=TORCH_CALLS)
def gelu_and_mul_torch(x: torch.Tensor, approximate: bool) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none") * up
