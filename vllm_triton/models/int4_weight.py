"""Weights of 4 bits, as AWQ, GPTQ or compressed-tensors made them: of a layer, and of experts."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.errors import ModelError
from vllm_triton.models.packed_weight import PackedWeight, Slot, Stored, frozen
from vllm_triton.ops.contract import FLOATS, INTS
from vllm_triton.ops.w4a16_mm.checkpoints import StoredWeight, from_awq, from_compressed_tensors, from_gptq
from vllm_triton.ops.w4a16_mm.layout import BLOCK, MIDDLE, PER_WORD, ROWS, pack_words
from vllm_triton.quantization.schemes import Int4Layout, Int4Scheme

_WORDS = (torch.int32,)


class Int4Parts(PackedWeight):
    """What a checkpoint holds of [N, K] in groups of columns.

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

    def read(self, parts: list[dict[str, torch.Tensor]]) -> list[StoredWeight]:
        """Args: parts: the tensors of each."""
        try:
            return [self._read(tensors) for tensors in parts]
        except ValueError as error:
            raise ModelError(f"completes a weight of 4 bits that cannot be read: {error}") from None

    def _read(self, tensors: dict[str, Any]) -> StoredWeight:
        match self.layout:
            case Int4Layout.AWQ:
                return from_awq(**tensors)
            case Int4Layout.COMPRESSED_TENSORS:
                return from_compressed_tensors(**tensors)
        return from_gptq(**tensors, checkpoint_format=self.layout.value)


class Int4Weight(Int4Parts):
    """[N, K] in groups of columns; parts of one product that have an order of columns (act-order) must have the same.

    Which of zeros and order there are, and the dtype of scales, shows when the tensors are there.
    """

    def __init__(self, sizes: Sequence[int], in_size: int, scheme: Int4Scheme):
        super().__init__(sizes, in_size, scheme)
        self.num_groups = -(-sum(sizes) // ROWS)
        self.quants = frozen(torch.empty(self.num_groups, in_size // PER_WORD, ROWS, dtype=torch.int32))
        self.scales = frozen(torch.empty(self.num_groups, self.scales_per_row, ROWS))
        self.zeros: nn.Parameter | None
        self.order: nn.Parameter | None
        self.register_parameter("zeros", None)
        self.register_parameter("order", None)

    def pack(self, parts: list[dict[str, torch.Tensor]]) -> None:
        read = self.read(parts)
        order = read[0].order
        if not all(_same(part.order, order) for part in read):
            raise ModelError(
                "completes layers of one product, which must have the same columns in each group: their g_idx differ"
            )
        zeros = torch.cat([_filled(part) for part in read]) if _have_zeros(read) else None
        packed = pack_words(torch.cat([part.words for part in read]), torch.cat([part.scales for part in read]), zeros)
        device = self.quants.device
        self.quants.copy_(packed[0])
        self.scales = frozen(packed[1].to(device))
        self.zeros = None if packed[2] is None else frozen(packed[2].to(device))
        self.order = None if order is None else frozen(order.to(device))

    def bias(self) -> nn.Parameter:
        return frozen(torch.zeros(ROWS * self.num_groups))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = ops.w4a16_mm(x, self.quants, self.scales, self.zeros, self.order, bias)
        return self.without_padding(out)

    def extra_repr(self) -> str:
        """With what a traced forward depends on."""
        present = "".join(f", {name}" for name in ("zeros", "order") if getattr(self, name) is not None)
        return f"{super().extra_repr()}, scales of {self.scales.dtype}{present}"


class Int4ExpertWeight(nn.Module):
    """One product of every expert, as `fused_moe_w4a16` takes it: rows of an expert's parts by turns.

    Whether there are zeros, and the dtype of scales, shows when the tensors are there.

    Args:
        sizes: rows of an expert's parts, equal ones, which a checkpoint has apart; a multiple of 16 together.
    Raises: ModelError where the columns are not whole groups, and at load for an order of columns.
    """

    def __init__(self, num_experts: int, sizes: Sequence[int], in_size: int, scheme: Int4Scheme):
        super().__init__()
        self.scheme = scheme
        # In a list, where a module does not count them among its own: nothing stays in one that is packed.
        self._experts = [_Int4Expert(sizes, in_size, scheme, self, place) for place in range(num_experts)]
        self.scales_shape = (num_experts, sum(sizes) // ROWS, self._experts[0].scales_per_row, ROWS)
        shape = (*self.scales_shape[:2], in_size // PER_WORD, ROWS)
        self.quants = frozen(torch.empty(shape, dtype=torch.int32))
        self.scales: nn.Parameter | None
        self.zeros: nn.Parameter | None
        self.register_parameter("scales", None)
        self.register_parameter("zeros", None)

    def slots(self) -> list[list[dict[str, Slot]]]:
        """Of each expert and of each of its parts, where its tensors belong, by the ends of their names."""
        return [[dict(part) for part in expert.slots()] for expert in self._experts]

    def put(self, place: int, parts: list[StoredWeight]) -> None:
        """Packs the expert that lies there."""
        words, scales = (_by_turns(list(tensors)) for tensors in zip(*(part[:2] for part in parts), strict=True))
        zeros = _by_turns([_filled(part) for part in parts]) if _have_zeros(parts) else None
        quants, scales, zeros = pack_words(words, scales, zeros)
        self.quants[place] = quants.to(self.quants.device)
        # Where scales are of several dtypes, one that has the values of all.
        dtype = scales.dtype if self.scales is None else torch.promote_types(self.scales.dtype, scales.dtype)
        self.scales = self._held(self.scales, 0, dtype)
        self.scales[place] = scales.to(self.scales)
        if self.zeros is not None or zeros is not None:
            self.zeros = self._held(self.zeros, MIDDLE, dtype)
            self.zeros[place] = MIDDLE if zeros is None else zeros.to(self.zeros)

    def _held(self, values: nn.Parameter | None, default: int, dtype: torch.dtype) -> nn.Parameter:
        """These values, or the default of all experts, in this dtype."""
        if values is None:
            return frozen(torch.full(self.scales_shape, default, dtype=dtype, device=self.quants.device))
        return values if values.dtype == dtype else frozen(values.to(dtype))

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Quants, scales and zeros, of a checkpoint that is loaded."""
        assert self.scales is not None, "no expert is loaded"
        return self.quants, self.scales, self.zeros

    def extra_repr(self) -> str:
        """With what a traced forward depends on."""
        dtype = None if self.scales is None else self.scales.dtype
        return f"{self.scheme}, scales of {dtype}{'' if self.zeros is None else ', zeros'}"


class _Int4Expert(Int4Parts):
    """One of an `Int4ExpertWeight`, until it is packed."""

    def __init__(self, sizes: Sequence[int], in_size: int, scheme: Int4Scheme, weight: Int4ExpertWeight, place: int):
        super().__init__(sizes, in_size, scheme)
        self._put = functools.partial(weight.put, place)

    def pack(self, parts: list[dict[str, torch.Tensor]]) -> None:
        read = self.read(parts)
        if any(part.order is not None for part in read):
            raise ModelError(
                "completes an expert of 4 bits whose columns are not in the order of their groups (act-order): experts "
                "must be quantized without it (desc_act false, actorder null or static)"
            )
        self._put(read)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _by_turns(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of parts [N, C]: the first of each, then the second of each, and so on."""
    return torch.cat([part[:, None] for part in parts], 1).flatten(0, 1)


def _have_zeros(parts: list[StoredWeight]) -> bool:
    return any(part.zeros is not None for part in parts)


def _filled(part: StoredWeight) -> torch.Tensor:
    """Its zeros, also where they are left out."""
    return torch.full(part.scales.shape, MIDDLE, dtype=torch.uint8) if part.zeros is None else part.zeros
