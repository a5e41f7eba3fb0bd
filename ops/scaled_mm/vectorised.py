"""The product by torch's own library call, of operands in float32."""

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.scaled_mm.op import has_blocks, scaled_mm
from vllm_triton.ops.scaled_mm.reference import per_value


@scaled_mm.impl("torch", capture=TORCH_CALLS)
def scaled_mm_torch(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    x, wide = a.float(), weight.float()
    x_scales, weight_scales = per_value(a_scale, a.shape), per_value(weight_scale, weight.shape)
    if has_blocks(weight, weight_scale):
        out = torch.nn.functional.linear(x * x_scales, wide * weight_scales)
    else:
        out = torch.nn.functional.linear(x, wide).mul_(x_scales).mul_(weight_scales.T)
    return (out if bias is None else out.add_(bias)).to(out_dtype)
