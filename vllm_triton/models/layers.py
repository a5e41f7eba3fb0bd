"""The layers that decoders are built of. Shapes: T tokens of the step, E hidden, K and N sizes of a projection."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from vllm_triton import ops


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, filled by the loader."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """x [T, K] -> [T, N]; the weight may hold several projections of x, stacked along N."""

    def __init__(self, in_size: int, out_size: int, bias: bool):
        super().__init__()
        self.weight = parameter(out_size, in_size)
        self.bias = parameter(out_size) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


def linear_slots(parts: Mapping[str, tuple[Linear, slice]]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint holds of projections, by the name that it has for each: rows of a weight, and of its bias."""
    for name, (linear, rows) in parts.items():
        yield f"{name}.weight", linear.weight[rows]
        if linear.bias is not None:
            yield f"{name}.bias", linear.bias[rows]


class RMSNorm(nn.Module):
    """With a residual: adds x to it first, and returns (normed, new residual)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
