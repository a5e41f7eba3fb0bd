"""A weight of 4 bits, as AWQ, GPTQ or compressed-tensors made it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.errors import ModelError
from vllm_triton.models.packed_weight import PackedWeight, Stored
from vllm_triton.ops.contract import FLOATS, INTS
from vllm_triton.ops.w4a16_mm.checkpoints import StoredWeight, from_awq, from_compressed_tensors, from_gptq
from vllm_triton.ops.w4a16_mm.layout import BLOCK, MIDDLE, PER_WORD, ROWS, pack_words
from vllm_triton.quantization.schemes import Int4Layout, Int4Scheme

_WORDS = (torch.int32,)


class Int4Weight(PackedWeight):
    """[N, K] in groups of columns; parts of one product that have an order of columns (act-order) must have the same.

    Which of zeros and order there are, and the dtype of scales, shows when the tensors are there.

    Raises: ModelError where the columns are not whole groups.
    """

    def __init__(self, sizes: Sequence[int], in_size: int, scheme: Int4Scheme):
        super().__init__(sizes, in_size, scheme)
        self.layout, self.has_zeros, self.is_ordered = scheme.layout, scheme.has_zeros, scheme.is_ordered
        group_size = scheme.group_size or in_size
        if in_size % group_size or group_size % BLOCK:
            raise ModelError(
                f"a weight of 4 bits in groups of {group_size} columns must have a multiple of them, and groups of "
                f"{BLOCK}, got {in_size} columns"
            )
        self.scales_per_row = in_size // group_size
        self.num_groups = -(-sum(sizes) // ROWS)
        self.quants = _parameter(torch.empty(self.num_groups, in_size // PER_WORD, ROWS, dtype=torch.int32))
        self.scales = _parameter(torch.empty(self.num_groups, self.scales_per_row, ROWS))
        self.zeros: nn.Parameter | None
        self.order: nn.Parameter | None
        self.register_parameter("zeros", None)
        self.register_parameter("order", None)

    def stored(self, size: int) -> Mapping[str, Stored]:
        depth, num_scales, num_words = self.in_size, self.scales_per_row, -(-size // PER_WORD)
        if self.layout is Int4Layout.COMPRESSED_TENSORS:
            stored = {
                "weight_packed": Stored(((size, depth // PER_WORD),), _WORDS),
                "weight_scale": Stored(((size, num_scales),), FLOATS),
                "weight_shape": Stored(((2,),), INTS),
            }
            if self.has_zeros:
                stored["weight_zero_point"] = Stored(((num_words, num_scales),), _WORDS)
            if self.is_ordered:
                stored["weight_g_idx"] = Stored(((depth,),), INTS)
            return stored
        is_awq = self.layout is Int4Layout.AWQ
        stored = {
            "qweight": Stored(((depth, num_words) if is_awq else (depth // PER_WORD, size),), _WORDS),
            "qzeros": Stored(((num_scales, num_words),), _WORDS),
            "scales": Stored(((num_scales, size),), FLOATS),
        }
        return stored if is_awq else stored | {"g_idx": Stored(((depth,),), INTS)}

    def pack(self, parts: list[dict[str, torch.Tensor]]) -> None:
        try:
            read = [self._read(tensors) for tensors in parts]
        except ValueError as error:
            raise ModelError(f"completes a weight of 4 bits that cannot be read: {error}") from None
        order = read[0].order
        if not all(_same(part.order, order) for part in read):
            raise ModelError(
                "completes layers of one product, which must have the same columns in each group: their g_idx differ"
            )
        zeros = None
        if any(part.zeros is not None for part in read):
            zeros = torch.cat([_filled(part) for part in read])
        packed = pack_words(torch.cat([part.words for part in read]), torch.cat([part.scales for part in read]), zeros)
        device = self.quants.device
        self.quants.copy_(packed[0])
        self.scales = _parameter(packed[1].to(device))
        self.zeros = None if packed[2] is None else _parameter(packed[2].to(device))
        self.order = None if order is None else _parameter(order.to(device))

    def _read(self, tensors: dict[str, Any]) -> StoredWeight:
        match self.layout:
            case Int4Layout.AWQ:
                return from_awq(**tensors)
            case Int4Layout.COMPRESSED_TENSORS:
                return from_compressed_tensors(**tensors)
        return from_gptq(**tensors, checkpoint_format=self.layout.value)

    def bias(self) -> nn.Parameter:
        return _parameter(torch.zeros(ROWS * self.num_groups))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = ops.w4a16_mm(x, self.quants, self.scales, self.zeros, self.order, bias)
        return out if out.shape[1] == sum(self.sizes) else out[:, : sum(self.sizes)]

    def extra_repr(self) -> str:
        """With what a traced forward depends on."""
        present = "".join(f", {name}" for name in ("zeros", "order") if getattr(self, name) is not None)
        return f"{super().extra_repr()}, scales of {self.scales.dtype}{present}"


def _parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _filled(part: StoredWeight) -> torch.Tensor:
    """Its zeros, also where they are left out."""
    return torch.full(part.scales.shape, MIDDLE, dtype=torch.uint8) if part.zeros is None else part.zeros
