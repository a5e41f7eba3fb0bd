import torch

from vllm_triton.ops.w4a16_mm.layout import per_value, unpack


def w4a16_mm_reference(
    x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = unpack(quants).to(wide) * per_value(scales).to(wide) + per_value(minima).to(wide)
    return (x.to(wide) @ weight.T).to(x.dtype)
