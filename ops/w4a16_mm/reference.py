import torch

from vllm_triton.ops.w4a16_mm.layout import dequantize


def w4a16_mm_reference(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    sorted_x = x if order is None else x.index_select(1, order)
    out = sorted_x.to(wide) @ dequantize(quants, scales, zeros, wide).T
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(x.dtype)
