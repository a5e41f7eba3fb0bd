"""Fills a model's parameters from named tensors, or with random values."""

from collections.abc import Iterable
from typing import Protocol

import torch

from vllm_triton.errors import ModelError
from vllm_triton.loading.checkpoint import StoredTensor
from vllm_triton.models.layers import Slot
from vllm_triton.models.packed_weight import PackedSlot
from vllm_triton.ops.contract import FLOATS

# Small enough that activations of any depth stay finite in float16.
DUMMY_STD = 0.02


class LoadableModel(Protocol):
    def weight_slots(self) -> Iterable[tuple[str, Slot]]: ...

    def surplus_names(self) -> tuple[str, ...]: ...


def packed_names(model: LoadableModel) -> set[str]:
    """Tensors of a GGUF file that the model takes as they are stored."""
    slots = model.weight_slots()
    return {name for name, slot in slots if isinstance(slot, PackedSlot) and slot.stored.dtypes == (torch.uint8,)}


def load_weights(model: LoadableModel, tensors: Iterable[tuple[str, StoredTensor]], source: str) -> None:
    """Copies every tensor into its slot, one at a time.

    Raises: ModelError for a missing, surplus or misshapen tensor, which names it.
    """
    slots = dict(model.weight_slots())
    empty = dict.fromkeys(slots)
    for name, tensor in tensors:
        slot = slots.get(name)
        if slot is None:
            if name.endswith(model.surplus_names()) or (name.endswith(".bias") and _is_zero(tensor)):
                continue
            raise ModelError(
                f"{source}: tensor {name} has no place in this model; does config.json belong to these weights?"
            )
        if name not in empty:
            raise ModelError(f"{source}: tensor {name} occurs twice")
        shapes = (slot.shape,) if isinstance(slot, torch.Tensor) else slot.stored.shapes
        if tensor.shape not in shapes:
            raise ModelError(f"{source}: tensor {name} must have shape {list(shapes[0])}, got {list(tensor.shape)}")
        if isinstance(slot, torch.Tensor) and tensor.dtype not in (*FLOATS, torch.float64):
            held = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{source}: tensor {name} must be of full precision, as its config.json says, got {held}")
        try:
            slot.copy_(tensor)  # type: ignore[arg-type]  # packed ones to packed ones, see packed_names
        except ModelError as error:
            raise ModelError(f"{source}: tensor {name} {error}") from None
        del empty[name]
    if empty:
        names = ", ".join(list(empty)[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise ModelError(f"{source}: tensor {names} is missing")


def _is_zero(tensor: StoredTensor) -> bool:
    """Whether a tensor adds nothing: some writers give every layer a bias."""
    return isinstance(tensor, torch.Tensor) and not tensor.any()


def fill_dummy_weights(model: LoadableModel, seed: int) -> None:
    """Random weights from a seed: norms around 1, everything else around 0. Every slot must take full precision."""
    generator = torch.Generator().manual_seed(seed)
    for name, slot in model.weight_slots():
        mean = 1.0 if "norm" in name else 0.0
        values = torch.empty(slot.shape).normal_(mean, DUMMY_STD, generator=generator)
        slot.copy_(values)
