"""Inputs from a contract: for property tests, benchmarks and comparisons."""

import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vllm_triton.ops.contract import Contract, Dims, Scalar, Tensor

T = TypeVar("T")


class Pick:
    """Chooses sizes: from Hypothesis in tests, from a seed elsewhere."""

    def __init__(self, integers: Callable[[int, int], int]):
        self._integers = integers

    @classmethod
    def seeded(cls, seed: int) -> "Pick":
        return cls(random.Random(seed).randint)

    def __call__(self, low: int, high: int) -> int:
        return self._integers(low, high)

    def of(self, *options: T) -> T:
        return options[self._integers(0, len(options) - 1)]


def make_inputs(
    contract: Contract, dims: Dims, dtype: torch.dtype, seed: int = 0, device: str = "cpu", margins: bool = False
) -> dict[str, Any]:
    """Arguments of one call.

    Args:
        dims: a size for every name in the contract; none for an axis that is to be missing.
        dtype: of the arguments that the contract lets choose among floats, and of results that an argument lets choose.
        margins: tensors of two or more dimensions become views inside larger buffers, so that they are not contiguous
            across rows; the buffers around them hold NaN (or the lowest integer).
    """
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {}
    for name, arg in contract.args.items():
        if isinstance(arg, Scalar):
            is_dtype = arg.type is torch.dtype and arg.valid(dtype)
            inputs[name] = dtype if is_dtype else dims.get(arg.size, arg.example)
            continue
        value = _values(arg, dims, generator)
        wanted = (
            inputs[arg.dtype].dtype if isinstance(arg.dtype, str) else dtype if dtype in arg.dtype else arg.dtype[0]
        )
        inputs[name] = value.to(wanted)
    if contract.arrange is not None:
        contract.arrange(inputs, dims, generator)
    return placed(inputs, device, margins)


def placed(inputs: dict[str, Any], device: str, margins: bool) -> dict[str, Any]:
    """The same arguments on a device, see `make_inputs`; those that are there already are not copied."""
    result = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            result[name] = _with_margins(value.to(device)) if margins and value.dim() >= 2 else value.to(device)
    return result


def _values(arg: Tensor, dims: Dims, generator: torch.Generator) -> torch.Tensor:
    if arg.values is not None:
        return arg.values(dims, generator)
    shape = arg.shape_in(dims)
    integers_only = not isinstance(arg.dtype, str) and not any(dtype.is_floating_point for dtype in arg.dtype)
    return torch.zeros(shape, dtype=torch.int64) if integers_only else torch.randn(shape, generator=generator)


def poison(dtype: torch.dtype) -> float | int | bool:
    """The value of memory that no kernel may read into a result or write."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bytes are equal: NaN equals the same NaN, and small floats need no arithmetic of their own."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _with_margins(value: torch.Tensor) -> torch.Tensor:
    """The same values as a view with 1 poisoned row before, 1 after, and 8 poisoned columns after each row."""
    shape = list(value.shape)
    buffer = value.new_full([shape[0] + 2, *shape[1:-1], shape[-1] + 8], poison(value.dtype))
    view = buffer[1:-1, ..., : shape[-1]]
    view.copy_(value)
    return view


def margins_untouched(view: torch.Tensor) -> bool:
    """Whether the poisoned surroundings made by `make_inputs(margins=True)` still hold their poison."""
    buffer = view._base
    if buffer is None:
        return True
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside[1:-1, ..., : view.shape[-1]] = False
    around = buffer[outside]
    return bool(around.isnan().all() if buffer.dtype.is_floating_point else (around == poison(buffer.dtype)).all())
