"""The product by torch's own library call, on a weight unpacked for this call."""

import torch

from vllm_triton.ops.gguf_mm.layout import unpack
from vllm_triton.ops.gguf_mm.op import gguf_mm
from vllm_triton.ops.registry import TORCH_CALLS


@gguf_mm.impl("torch", capture=TORCH_CALLS)
def gguf_mm_torch(
    x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    weight = unpack(quants, scales, x.shape[1], torch.float32)
    return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)
