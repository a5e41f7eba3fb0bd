"""The product by torch's own library call, on a weight unpacked for this call."""

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.w4a16_mm.layout import dequantize
from vllm_triton.ops.w4a16_mm.op import w4a16_mm


@w4a16_mm.impl("torch", capture=TORCH_CALLS)
def w4a16_mm_torch(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    sorted_x = (x if order is None else x.index_select(1, order)).float()
    weight = dequantize(quants, scales, zeros, torch.float32)
    return torch.nn.functional.linear(sorted_x, weight, None if bias is None else bias.float()).to(x.dtype)
