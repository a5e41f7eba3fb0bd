"""How a layer holds its weight, and how it rounds what the weight is multiplied by. Values alone, no tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch


class Sharing(Enum):
    """Which values share a scale: all of a tensor, a row (a channel of a weight, a token of activations), or a block
    of 128 x 128 (of activations: 128 of a row).
    """

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"


@dataclass(frozen=True)
class QuantKey:
    """Numbers of few bits, symmetric about zero.

    dtype: torch.int8 or torch.float8_e4m3fn.
    is_static: the scale is stored, not found in the values. Of activations, one for a whole tensor alone can be; one
        that is found is a token's or finer, so that no request's result depends on the others of its step.
    """

    dtype: torch.dtype
    sharing: Sharing
    is_static: bool = False

    def __str__(self) -> str:
        name = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}[self.dtype]
        return f"{name} per {self.sharing.value}{', static' if self.is_static else ''}"


@dataclass(frozen=True)
class ScaledScheme:
    """Weight and activations of one dtype, multiplied as such (`scaled_mm`).

    scale_name: what a checkpoint calls the weight's scale; None where it holds a weight of full precision, which is
        rounded when it is loaded.
    """

    weight: QuantKey
    activation: QuantKey
    scale_name: str | None = None

    def __str__(self) -> str:
        return f"{self.weight}, activations {self.activation}"


class Int4Layout(Enum):
    """How a checkpoint stores 4-bit weights."""

    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"  # zero points as they are, not less one
    COMPRESSED_TENSORS = "pack-quantized"


@dataclass(frozen=True)
class Int4Scheme:
    """A 4-bit weight, by which activations of full precision are multiplied (`w4a16_mm`).

    group_size: columns of the weight that share a scale; None for all.
    has_zeros: groups have a zero point, not 8.
    is_ordered: columns are not in the order of their groups (act-order); the checkpoint says which group each is of.
    """

    layout: Int4Layout
    group_size: int | None
    has_zeros: bool
    is_ordered: bool

    def __str__(self) -> str:
        return f"int4 ({self.layout.value}) in groups of {self.group_size or 'a row'}"


@dataclass(frozen=True)
class GgufScheme:
    """A weight as a GGUF file has it (`gguf_mm`). name: of the format, as Q4_K."""

    name: str

    def __str__(self) -> str:
        return self.name


Scheme = ScaledScheme | Int4Scheme | GgufScheme


class LayerKind(Enum):
    LINEAR = "linear layer"
    EXPERTS = "experts"
    ROUTER = "router"
    HEAD = "head"
    EMBEDDING = "embedding"


# From a layer's name in the checkpoint (as model.layers.0.mlp.down_proj) to its scheme; None for full precision.
Schemes = Callable[[str, LayerKind], Scheme | None]


def dense(name: str, kind: LayerKind) -> None:
    """Schemes of a model in full precision."""
