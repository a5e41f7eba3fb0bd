"""What weights that are not dense have in common: a checkpoint holds them as several tensors, of types of their own."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_triton.errors import ModelError
from vllm_triton.quantization.schemes import GgufScheme, Int4Scheme, Scheme


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint. shapes, dtypes: that it may have; the first are the usual ones."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class PackedSlot:
    """Where a stored tensor belongs. take: keeps or converts it."""

    stored: Stored
    take: Callable[[Any], object]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.stored.shapes[0])

    def copy_(self, source: Any) -> None:
        """Raises: ModelError for a type of numbers that does not belong here."""
        if source.dtype not in self.stored.dtypes:
            named = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.stored.dtypes)
            raise ModelError(f"must hold {named}, got {str(source.dtype).removeprefix('torch.')}")
        self.take(source)


Slot = torch.Tensor | PackedSlot


def frozen(values: torch.Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(values, requires_grad=False)


class PackedWeight(nn.Module):
    """A weight [N, K] whose tensors are kept as they come and packed once the last is there: rows of its parts may lie
    interleaved, and a part may be of several tensors. See DenseWeight for what it offers.

    Args:
        sizes: rows of its parts, which a checkpoint has apart.
        in_size: K.
        scheme: how it is held.
    """

    def __init__(self, sizes: Sequence[int], in_size: int, scheme: GgufScheme | Int4Scheme):
        super().__init__()
        self.sizes, self.in_size = list(sizes), in_size
        self.scheme: Scheme = scheme
        self._arrived: list[dict[str, Any]] = [{} for _ in self.sizes]

    def stored(self, size: int) -> Mapping[str, Stored]:
        """What a checkpoint holds of a part with so many rows, by the ends of the tensors' names."""
        raise NotImplementedError

    def pack(self, parts: list[dict[str, Any]]) -> None:
        """Fills the parameters. Args: parts: the tensors of each."""
        raise NotImplementedError

    def slots(self) -> list[dict[str, PackedSlot]]:
        """Of each part, where its tensors belong."""
        return [
            {
                name: PackedSlot(stored, functools.partial(self._take, part, name))
                for name, stored in self.stored(size).items()
            }
            for part, size in enumerate(self.sizes)
        ]

    def _take(self, part: int, name: str, tensor: Any) -> None:
        self._arrived[part][name] = tensor
        if all(len(tensors) == len(self.stored(size)) for tensors, size in zip(self._arrived, self.sizes, strict=True)):
            parts, self._arrived = self._arrived, [{} for _ in self.sizes]
            self.pack(parts)

    def without_padding(self, out: torch.Tensor) -> torch.Tensor:
        """Results [T, N], of which the last rows of the weight may be there to fill a group."""
        return out if out.shape[1] == sum(self.sizes) else out[:, : sum(self.sizes)]

    def extra_repr(self) -> str:
        return str(self.scheme)


def schemes_of(model: Any) -> list[Scheme]:
    """Of a model's weights that are not dense. Args: model: a torch module."""
    found = (getattr(module, "scheme", None) for module in model.modules())
    return [scheme for scheme in found if scheme is not None]
