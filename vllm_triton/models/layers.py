"""The layers that decoders are built of. Shapes: T tokens of the step, E hidden, K and N sizes of a projection."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.models.gguf_weight import GgufSlot, GgufWeight


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, filled by the loader."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class DenseWeight(nn.Module):
    """A weight [N, K] in the dtype of what it is multiplied by. Other classes hold one in another form.

    Args:
        sizes: rows of its parts, which a checkpoint has apart.
        in_size: K.
    """

    def __init__(self, sizes: Sequence[int], in_size: int):
        super().__init__()
        self.sizes = list(sizes)
        self.weight = parameter(sum(sizes), in_size)

    def slots(self) -> list[torch.Tensor]:
        """Where the parts belong."""
        return list(self.weight.split(self.sizes))

    def bias(self) -> nn.Parameter:
        """One that fits."""
        return parameter(sum(self.sizes))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> [T, N]"""
        return ops.linear(x, self.weight, bias)

    def embedding(self, token_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Its rows, scaled: [T] -> [T, K]"""
        return ops.embedding(token_ids, self.weight, scale)


Weight = DenseWeight | GgufWeight
Slot = torch.Tensor | GgufSlot
Packed = Mapping[str, str]  # name of a tensor in the checkpoint -> the format that it stays in


def weight_of(sizes: Sequence[int], in_size: int, packed: str | None) -> Weight:
    """Args: packed: the format that it stays in, or None."""
    return DenseWeight(sizes, in_size) if packed is None else GgufWeight(sizes, in_size, packed)


class Linear(nn.Module):
    """Projections of x [T, K] to [T, N], stacked: neighbours that are held alike are one product.

    Args:
        in_size: K.
        sizes: N of each.
        packed: for each the format that its weight stays in, or None; by default all are dense.
    """

    def __init__(self, in_size: int, sizes: Sequence[int], bias: bool, packed: Sequence[str | None] = ()):
        super().__init__()
        held = itertools.groupby(zip(packed or [None] * len(sizes), sizes, strict=True), key=lambda each: each[0])
        weights = [weight_of([size for _, size in run], in_size, name) for name, run in held]
        self.weights = nn.ModuleList(weights)
        self.biases = nn.ParameterList([weight.bias() for weight in weights] if bias else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, all N]: of projections that are held alike."""
        (out,) = self._products(x)
        return out

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One result for each projection."""
        return [
            part
            for weight, out in zip(self.runs(), self._products(x), strict=True)
            for part in out.split(weight.sizes, dim=-1)
        ]

    def _products(self, x: torch.Tensor) -> list[torch.Tensor]:
        biases = list(self.biases) or [None] * len(self.weights)
        return [weight.linear(x, bias) for weight, bias in zip(self.runs(), biases, strict=True)]

    def runs(self) -> list[Weight]:
        return cast(list[Weight], list(self.weights))

    def slots(self) -> list[tuple[Slot, torch.Tensor | None]]:
        """Of each projection, where weight and bias belong."""
        weights: list[Slot] = [slot for weight in self.runs() for slot in weight.slots()]
        biases = [
            slot
            for weight, bias in zip(self.runs(), self.biases, strict=bool(self.biases))
            for slot in bias[: sum(weight.sizes)].split(weight.sizes)
        ]
        return list(zip(weights, biases or [None] * len(weights), strict=True))

    def whole_slot(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where all projections in one tensor belong, weight and bias. Only of dense ones."""
        [weight] = self.runs()
        assert isinstance(weight, DenseWeight), "packed projections arrive one by one"
        return weight.weight, self.biases[0] if self.biases else None


def linear_slots(parts: Mapping[tuple[str, ...], Linear]) -> Iterator[tuple[str, Slot]]:
    """What a checkpoint holds of projections. Args: parts: the checkpoint's names of each one's, or one name of all."""
    for names, linear in parts.items():
        slots = linear.slots()
        if len(names) < len(slots):
            slots = [linear.whole_slot()]
        for name, (weight, bias) in zip(names, slots, strict=True):
            yield f"{name}.weight", weight
            if bias is not None:
                yield f"{name}.bias", bias


class RMSNorm(nn.Module):
    """Adds x to the residual first, and returns (normed, new residual); where there is none yet, x becomes it."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self.alone(x), x
        return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
