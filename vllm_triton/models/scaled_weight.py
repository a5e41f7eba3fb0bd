"""A weight in int8 or fp8, beside activations that are rounded likewise."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.models.packed_weight import PackedWeight, Stored
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


class ScaledWeight(PackedWeight):
    """[N, K] and its scales: of rows, also where a checkpoint has one for a whole part, or of blocks."""

    def __init__(self, sizes: Sequence[int], in_size: int, scheme: ScaledScheme):
        super().__init__(sizes, in_size, scheme)
        self.scheme = scheme
        assert all(can_end(scheme, size) for size in self.sizes[:-1]), self.sizes
        num_rows, has_blocks = sum(sizes), scheme.weight.sharing is Sharing.BLOCK
        scale_shape = _num_blocks(num_rows, in_size) if has_blocks else (num_rows, 1)
        self.weight = _parameter(torch.empty(num_rows, in_size, dtype=scheme.weight.dtype))
        self.weight_scale = _parameter(torch.empty(scale_shape, dtype=torch.float32))
        static = torch.empty(1, dtype=torch.float32) if scheme.activation.is_static else None
        self.input_scale = None if static is None else _parameter(static)

    def stored(self, size: int) -> Mapping[str, Stored]:
        scheme, shape = self.scheme, (size, self.in_size)
        if scheme.scale_name is None:
            return {"weight": Stored((shape,), FLOATS)}
        scales: dict[Sharing, tuple[tuple[int, ...], ...]] = {
            Sharing.TENSOR: ((1,), ()),
            Sharing.ROW: ((size, 1), (size,)),
            Sharing.BLOCK: (_num_blocks(*shape),),
        }
        stored = {
            "weight": Stored((shape,), (scheme.weight.dtype,)),
            scheme.scale_name: Stored(scales[scheme.weight.sharing], FLOATS),
        }
        return stored | ({"input_scale": Stored(((1,), ()), FLOATS)} if scheme.activation.is_static else {})

    def pack(self, parts: list[dict[str, torch.Tensor]]) -> None:
        key, first, first_scale = self.scheme.weight, 0, 0
        for size, tensors in zip(self.sizes, parts, strict=True):
            weight = tensors["weight"].to(self.weight.device)
            if self.scheme.scale_name is None:
                weight, scale = _rounded(weight, key)
            else:
                scale = tensors[self.scheme.scale_name].to(self.weight.device, torch.float32)
            self.weight[first : first + size].copy_(weight)
            num_scales = -(-size // SCALE_BLOCK) if key.sharing is Sharing.BLOCK else size
            # One scale of a whole part is that of each of its rows.
            scale = scale.reshape(-1, self.weight_scale.shape[1])
            self.weight_scale[first_scale : first_scale + num_scales].copy_(scale.expand(num_scales, -1))
            first, first_scale = first + size, first_scale + num_scales
        if self.input_scale is not None:  # the input is one, and rounded once: with what cuts off none of the parts'
            self.input_scale.copy_(
                torch.stack([tensors["input_scale"].float().reshape(1) for tensors in parts]).amax(0)
            )

    def bias(self) -> nn.Parameter:
        return _parameter(torch.empty(sum(self.sizes)))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        key = self.scheme.activation
        values, scales = ops.scaled_quant(x, key.dtype, _GROUP_SIZES[key.sharing], self.input_scale)
        return ops.scaled_mm(values, self.weight, scales, self.weight_scale, x.dtype, bias)


def _parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _num_blocks(num_rows: int, num_columns: int) -> tuple[int, int]:
    return -(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK)


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
