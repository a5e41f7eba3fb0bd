"""The product by torch's own library call, on a weight unpacked for this call."""

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.w4a16_mm.layout import per_value, unpack
from vllm_triton.ops.w4a16_mm.op import w4a16_mm


@w4a16_mm.impl("torch", capture=TORCH_CALLS)
def w4a16_mm_torch(x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    weight = torch.addcmul(per_value(minima).float(), unpack(quants).float(), per_value(scales).float())
    return torch.nn.functional.linear(x.float(), weight).to(x.dtype)
