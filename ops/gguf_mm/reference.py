import torch

from vllm_triton.ops.gguf_mm.layout import unpack


def gguf_mm_reference(
    x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide) @ unpack(quants, scales, x.shape[1], wide).T
    if bias is not None:
        out = out + bias.to(wide)
    return out.to(x.dtype)
