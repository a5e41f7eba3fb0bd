"""The layers that decoders are built of. Shapes: T tokens of the step, E hidden, K and N sizes of a projection."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.errors import ModelError
from vllm_triton.models.gguf_weight import GgufWeight
from vllm_triton.models.int4_weight import Int4Weight
from vllm_triton.models.packed_weight import Slot, frozen
from vllm_triton.models.scaled_weight import ScaledWeight, can_end
from vllm_triton.quantization.schemes import GgufScheme, Int4Scheme, ScaledScheme, Scheme


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, filled by the loader."""
    return frozen(torch.empty(*shape))


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

    def slots(self) -> list[dict[str, Slot]]:
        """Of each part, where its tensors belong, by the ends of their names."""
        return [{"weight": part} for part in self.weight.split(self.sizes)]

    def bias(self) -> nn.Parameter:
        """One that fits."""
        return parameter(sum(self.sizes))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> [T, N]"""
        return ops.linear(x, self.weight, bias)

    def embedding(self, token_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Its rows, scaled: [T] -> [T, K]"""
        return ops.embedding(token_ids, self.weight, scale)


Table = DenseWeight | GgufWeight  # one that embeds, too
Weight = Table | ScaledWeight | Int4Weight


def weight_of(sizes: Sequence[int], in_size: int, scheme: Scheme | None) -> Weight:
    """Args: scheme: how it is held; None for full precision."""
    match scheme:
        case GgufScheme():
            return GgufWeight(sizes, in_size, scheme)
        case ScaledScheme():
            return ScaledWeight(sizes, in_size, scheme)
        case Int4Scheme():
            return Int4Weight(sizes, in_size, scheme)
    return DenseWeight(sizes, in_size)


class Linear(nn.Module):
    """Projections of x [T, K] to [T, N], stacked: neighbours that are held alike are one product.

    Args:
        in_size: K.
        sizes: N of each.
        schemes: how each is held that the checkpoint has; by default in full precision.
        fused: the checkpoint has all of them as one.
    """

    def __init__(
        self,
        in_size: int,
        sizes: Sequence[int],
        bias: bool,
        schemes: Sequence[Scheme | None] = (),
        fused: bool = False,
    ):
        super().__init__()
        parts = [sum(sizes)] if fused else list(sizes)
        runs = _runs(schemes or [None] * len(parts), parts)
        self.run_sizes = [list(sizes)] if fused else [sizes for _, sizes in runs]
        weights = [weight_of(sizes, in_size, scheme) for scheme, sizes in runs]
        self.weights = nn.ModuleList(weights)
        self.biases = nn.ParameterList([weight.bias() for weight in weights] if bias else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, all N]: of projections that are held alike."""
        (out,) = self._products(x)
        return out

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One result for each projection."""
        products = zip(self.run_sizes, self._products(x), strict=True)
        return [part for sizes, out in products for part in out.split(sizes, dim=-1)]

    def _products(self, x: torch.Tensor) -> list[torch.Tensor]:
        biases = list(self.biases) or [None] * len(self.weights)
        return [weight.linear(x, bias) for weight, bias in zip(self.runs(), biases, strict=True)]

    def runs(self) -> list[Weight]:
        return cast(list[Weight], list(self.weights))

    def slots(self) -> list[dict[str, Slot]]:
        """Of each projection that the checkpoint has, where its tensors belong, by the ends of their names."""
        parts: list[dict[str, Slot]] = [dict(part) for weight in self.runs() for part in weight.slots()]
        biases = [
            part
            for weight, bias in zip(self.runs(), self.biases, strict=bool(self.biases))
            for part in bias[: sum(weight.sizes)].split(weight.sizes)
        ]
        for slots, bias in zip(parts, biases, strict=bool(biases)):
            slots["bias"] = bias
        return parts


def _runs(schemes: Sequence[Scheme | None], sizes: Sequence[int]) -> list[tuple[Scheme | None, list[int]]]:
    """Neighbours that can be one product, and how they are held."""
    runs: list[tuple[Scheme | None, list[int]]] = []
    for scheme, size in zip(schemes, sizes, strict=True):
        if runs and runs[-1][0] == scheme and can_end(scheme, sum(runs[-1][1])):
            runs[-1][1].append(size)
        else:
            runs.append((scheme, [size]))
    return runs


def linear_slots(layers: Mapping[tuple[str, ...], Linear]) -> Iterator[tuple[str, Slot]]:
    """What a checkpoint holds of projections. Args: layers: by the checkpoint's names of all that they have."""
    for names, linear in layers.items():
        for name, slots in zip(names, linear.slots(), strict=True):
            for ending, slot in slots.items():
                yield f"{name}.{ending}", slot


def table_slots(name: str, table: Weight) -> Iterator[tuple[str, Slot]]:
    """What a checkpoint holds of a weight of one part."""
    for ending, slot in table.slots()[0].items():
        yield f"{name}.{ending}", slot


def held_alike(schemes: Sequence[Scheme | None], names: Sequence[str]) -> Sequence[Scheme | None]:
    """The schemes of projections that are one product, whose result is read as a whole.

    Raises: ModelError where they differ, but for a GGUF file's, which are all dequantised then.
    """
    if len(set(schemes)) == 1:
        return schemes
    if all(scheme is None or isinstance(scheme, GgufScheme) for scheme in schemes):
        return [None] * len(schemes)
    other = next(number for number, scheme in enumerate(schemes) if scheme != schemes[0])
    held = " and ".join(f"{names[number]} as {schemes[number] or 'full precision'}" for number in (0, other))
    raise ModelError(f"layers of one product must be quantized alike, or all be ignored, got {held}")


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
