"""Weights in int8 or fp8, beside activations that are rounded likewise: of a layer, and of experts."""

from collections.abc import Sequence

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.models.packed_weight import PackedSlot, Slot, Stored, frozen
from vllm_triton.ops.contract import FLOATS
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK
from vllm_triton.ops.scaled_quant import PER_TENSOR, PER_TOKEN
from vllm_triton.ops.scaled_quant.reference import quantized, scale_of
from vllm_triton.quantization.schemes import QuantKey, ScaledScheme, Scheme, Sharing

_GROUP_SIZES = {Sharing.TENSOR: PER_TENSOR, Sharing.ROW: PER_TOKEN, Sharing.BLOCK: SCALE_BLOCK}


def can_end(scheme: Scheme | None, num_rows: int) -> bool:
    """Whether rows of another part can follow so many in one weight."""
    has_blocks = isinstance(scheme, ScaledScheme) and scheme.weight.sharing is Sharing.BLOCK
    return not has_blocks or num_rows % SCALE_BLOCK == 0


class ScaledWeight(nn.Module):
    """[N, K] and its scales: of rows, also where a checkpoint has one for a whole part, or of blocks.

    Args: as of DenseWeight.
    """

    def __init__(self, sizes: Sequence[int], in_size: int, scheme: ScaledScheme):
        super().__init__()
        assert all(can_end(scheme, size) for size in sizes[:-1]), sizes
        self.sizes, self.scheme = list(sizes), scheme
        scale_shape = num_scales(scheme, sum(sizes), in_size)
        self.weight = frozen(torch.empty(sum(sizes), in_size, dtype=scheme.weight.dtype))
        self.weight_scale = frozen(torch.empty(scale_shape, dtype=torch.float32))
        self.input_scale = input_scale(scheme)

    def slots(self) -> list[dict[str, PackedSlot]]:
        heights = [num_scales(self.scheme, size, 1)[0] for size in self.sizes]
        parts = zip(self.weight.split(self.sizes), self.weight_scale.split(heights), strict=True)
        return [scaled_slots(self.scheme, *part, self.input_scale) for part in parts]

    def bias(self) -> nn.Parameter:
        return frozen(torch.empty(sum(self.sizes)))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        key = self.scheme.activation
        values, scales = ops.scaled_quant(x, key.dtype, _GROUP_SIZES[key.sharing], self.input_scale)
        return ops.scaled_mm(values, self.weight, scales, self.weight_scale, x.dtype, bias)

    def extra_repr(self) -> str:
        return str(self.scheme)


class ExpertWeight(nn.Module):
    """One product of every expert, [X, N, K], as `fused_moe` takes it.

    Args:
        sizes: rows of an expert's parts, equal ones, which a checkpoint has apart.
        scheme: how it is held; None for full precision, where there are no scales.
    """

    def __init__(self, num_experts: int, sizes: Sequence[int], in_size: int, scheme: ScaledScheme | None):
        super().__init__()
        self.sizes, self.scheme = list(sizes), scheme
        dtype = scheme.weight.dtype if scheme else None
        self.weight = frozen(torch.empty(num_experts, sum(sizes), in_size, dtype=dtype))
        self.weight_scale = self.input_scale = None
        if scheme is not None:
            # Blocks of a part begin at its first row.
            height, width = num_scales(scheme, self.sizes[0], in_size)
            scales = torch.empty(num_experts, height * len(self.sizes), width, dtype=torch.float32)
            self.weight_scale, self.input_scale = frozen(scales), input_scale(scheme)

    def slots(self) -> list[list[dict[str, Slot]]]:
        """Of each expert and of each of its parts, where its tensors belong, by the ends of their names."""
        if self.scheme is None or self.weight_scale is None:
            return [[{"weight": part} for part in weight.split(self.sizes)] for weight in self.weight]
        scheme, static = self.scheme, self.input_scale
        experts = zip(self.weight, self.weight_scale, strict=True)
        return [
            [
                dict(scaled_slots(scheme, *part, static))
                for part in zip(weight.split(self.sizes), scale.chunk(len(self.sizes)), strict=True)
            ]
            for weight, scale in experts
        ]

    def extra_repr(self) -> str:
        return str(self.scheme)


def input_scale(scheme: ScaledScheme) -> nn.Parameter | None:
    """Where the scale of a layer's input belongs, if checkpoints have one: the largest, which cuts off least."""
    return frozen(torch.zeros(1, dtype=torch.float32)) if scheme.activation.is_static else None


def num_scales(scheme: ScaledScheme, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Rows and columns of a weight's scales."""
    if scheme.weight.sharing is Sharing.BLOCK:
        return -(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK)
    return num_rows, 1


def scaled_slots(
    scheme: ScaledScheme, weight: torch.Tensor, scale: torch.Tensor, static: torch.Tensor | None
) -> dict[str, PackedSlot]:
    """Where a part's tensors belong, by the ends of their names.

    Args: weight, scale: its rows of a weight's values and scales. static: the layer's input scale, if there is one.
    """
    if scheme.scale_name is None:

        def take_dense(tensor: torch.Tensor) -> None:
            values, found = _rounded(tensor.to(weight.device), scheme.weight)
            weight.copy_(values)
            scale.copy_(found.expand_as(scale))

        return {"weight": PackedSlot(Stored((weight.shape,), FLOATS), take_dense)}

    def take_scale(tensor: torch.Tensor) -> None:
        # One of a whole part is that of each of its rows.
        scale.copy_(tensor.reshape(-1, scale.shape[1]).expand_as(scale))

    shapes = {Sharing.TENSOR: ((1,), ()), Sharing.ROW: (scale.shape, scale.shape[:1]), Sharing.BLOCK: (scale.shape,)}
    slots = {
        "weight": PackedSlot(Stored((weight.shape,), (scheme.weight.dtype,)), weight.copy_),
        scheme.scale_name: PackedSlot(Stored(shapes[scheme.weight.sharing], FLOATS), take_scale),
    }
    if static is not None:

        def take_static(tensor: torch.Tensor) -> None:
            static.copy_(torch.maximum(static, tensor.to(static)))

        slots["input_scale"] = PackedSlot(Stored(((1,), ()), FLOATS), take_static)
    return slots


def _rounded(weight: torch.Tensor, key: QuantKey) -> tuple[torch.Tensor, torch.Tensor]:
    """values [N, K] of key.dtype; scales [1, 1], [N, 1], or of blocks."""
    wide = weight.float()
    if key.sharing is not Sharing.BLOCK:
        largest = wide.abs().amax((0, 1) if key.sharing is Sharing.TENSOR else 1)
        scale = scale_of(largest.reshape(-1, 1), key.dtype)
        return quantized(wide, scale, key.dtype), scale
    num_rows, num_columns = weight.shape
    padded = nn.functional.pad(wide, (0, -num_columns % SCALE_BLOCK, 0, -num_rows % SCALE_BLOCK))
    blocks = padded.unflatten(1, (-1, SCALE_BLOCK)).unflatten(0, (-1, SCALE_BLOCK))  # [R, 128, Q, 128]
    scale = scale_of(blocks.abs().amax((1, 3)), key.dtype)
    values = quantized(blocks, scale[:, None, :, None], key.dtype).flatten(2).flatten(0, 1)
    return values[:num_rows, :num_columns], scale
