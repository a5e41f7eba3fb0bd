"""Activations as small numbers and scales, in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.scaled_quant.op import scaled_quant
from vllm_triton.ops.scaled_quant.reference import LARGEST, PER_TENSOR, PER_TOKEN, scale_of


@scaled_quant.impl("torch", capture=TORCH_CALLS)
def scaled_quant_torch(
    x: torch.Tensor, dtype: torch.dtype, group_size: int, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_columns = x.shape
    wide = x.float()
    if scale is not None:
        return _rounded(wide / scale, dtype), scale.clone()
    if num_tokens == 0:  # of which none is the largest
        return scaled_quant.reference(x, dtype, group_size)
    if group_size in (PER_TENSOR, PER_TOKEN):
        axes = (0, 1) if group_size == PER_TENSOR else (1,)
        scales = scale_of(torch.linalg.vector_norm(wide, torch.inf, axes, keepdim=True), dtype)
        return _rounded(wide / scales, dtype), scales.view(1) if group_size == PER_TENSOR else scales
    missing = -num_columns % group_size
    groups = (torch.nn.functional.pad(wide, (0, missing)) if missing else wide).unflatten(1, (-1, group_size))
    scales = scale_of(torch.linalg.vector_norm(groups, torch.inf, 2), dtype)
    values = _rounded(groups / scales[:, :, None], dtype).flatten(1)
    return values[:, :num_columns].contiguous(), scales


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Writes into `values`."""
    values.clamp_(-LARGEST[dtype], LARGEST[dtype])
    return (values.round_() if dtype == torch.int8 else values).to(dtype)
