"""SiLU and multiplication in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.silu_and_mul.op import silu_and_mul


@silu_and_mul.impl("torch", capture=TORCH_CALLS)
def silu_and_mul_torch(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
