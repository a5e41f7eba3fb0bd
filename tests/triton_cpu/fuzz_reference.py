"""`triton.language` over torch tensors, for programs whose results are the same whatever the order of their sums.

Every float is a whole number that its type holds exactly, or infinite, or NaN; a program that leaves this ground, or
the memory it was given, or that stores twice to one place at a time, is `Rejected`: it says nothing about a backend.
"""

import builtins
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MOST_TURNS = 9
# Well below the first whole number that the type leaves out, so that partial sums stay exact too.
_LARGEST = {torch.float32: 2**22, torch.float16: 2**10, torch.bfloat16: 2**7, torch.float64: 2**50}


class Rejected(Exception):
    """The program's result is not one that every correct backend must give."""


@dataclass
class Memory:
    """A buffer and how far it was used: `end` is one past the last element that any lane touched."""

    tensor: torch.Tensor
    end: int = 1

    def places(self, offsets: torch.Tensor) -> torch.Tensor:
        if offsets.numel():
            if int(offsets.min()) < 0 or int(offsets.max()) >= self.tensor.numel():
                raise Rejected("out of bounds")
            self.end = max(self.end, int(offsets.max()) + 1)
        return offsets


@dataclass
class Pointer:
    memory: Memory
    offsets: torch.Tensor = field(default_factory=lambda: torch.tensor(0))

    def __add__(self, count: Any) -> "Pointer":
        if isinstance(count, torch.Tensor):
            count = count.long()
        return Pointer(self.memory, self.offsets + count)


class _Exact(TorchFunctionMode):
    """Rejects what floats cannot hold exactly, and casts that C++ leaves undefined."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            _bounded(result)
            is_cast = func is torch.Tensor.to and args[0].is_floating_point() and not result.is_floating_point()
            if is_cast and not torch.equal(result.double(), args[0].double()):
                raise Rejected("cast of a float that is no such integer")
        return result


def _bounded(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        magnitude = value.abs()
        if bool(((magnitude > _LARGEST[value.dtype]) & magnitude.isfinite()).any()):
            raise Rejected("inexact")
    return value


def _count_turns(*bounds: int) -> range:
    turns = range(*(int(bound) for bound in bounds))
    if len(turns) > MOST_TURNS:
        raise Rejected("too many turns")
    return turns


def _active(pointer: Pointer, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = pointer.offsets
    mask = torch.as_tensor(True if mask is None else mask).broadcast_to(offsets.shape)
    return offsets, mask


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> torch.Tensor:
    offsets, active = _active(pointer, mask)
    tensor = pointer.memory.tensor
    pointer.memory.places(offsets[active])
    fallback = torch.as_tensor(0 if other is None else other).to(tensor.dtype).broadcast_to(offsets.shape)
    return torch.where(active, tensor[torch.where(active, offsets, 0)], fallback)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offsets, active = _active(pointer, mask)
    places = pointer.memory.places(offsets[active])
    if places.unique().numel() != places.numel():
        raise Rejected("two lanes store to one place")
    tensor = pointer.memory.tensor
    value = torch.as_tensor(value).to(tensor.dtype).broadcast_to(offsets.shape)
    tensor[places] = value[active]


def _sum(x: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    if x.is_floating_point():
        _bounded(
            x.nan_to_num(0, 0, 0).abs().sum(dtype=x.dtype) if axis is None else x.nan_to_num(0, 0, 0).abs().sum(axis)
        )
    return x.sum(dtype=x.dtype) if axis is None else x.sum(axis, dtype=x.dtype)


def _extreme(function: Any) -> Any:
    """Triton's max and min leave NaN out where anything else is left."""

    def reduce(x: torch.Tensor, axis: int | None = None) -> torch.Tensor:
        x = x.flatten() if axis is None else x
        axis = axis or 0
        result = x.select(axis, 0)
        for index in range(1, x.shape[axis]):
            result = function(result, x.select(axis, index))
        return result

    return reduce


def _dot(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor, input_precision: str) -> torch.Tensor:
    wide = torch.float64 if a.is_floating_point() else torch.int32
    products = a.to(wide)[:, :, None] * b.to(wide)[None]
    if a.is_floating_point():
        _bounded(products.nan_to_num(0, 0, 0).abs().sum(1).float())
    return (products.sum(1, dtype=wide) + acc.to(wide)).to(acc.dtype)


def _argmax(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.from_numpy(x.numpy().argmax(axis)).int() if x.dim() > 1 else torch.tensor(x.numpy().argmax()).int()


def _cumsum(x: torch.Tensor, axis: int, reverse: bool = False) -> torch.Tensor:
    if x.is_floating_point():
        _bounded(x.nan_to_num(0, 0, 0).abs().sum(axis))
    return x.flip(axis).cumsum(axis, dtype=x.dtype).flip(axis) if reverse else x.cumsum(axis, dtype=x.dtype)


def _language(program: int) -> SimpleNamespace:
    dtypes = {
        name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "int16", "int32", "int64")
    }
    return SimpleNamespace(
        **dtypes,
        program_id=lambda axis: program,
        arange=lambda low, high: torch.arange(low, high, dtype=torch.int32),
        load=_load,
        store=_store,
        where=lambda mask, yes, no: torch.where(torch.as_tensor(mask), yes, no),
        full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
        broadcast_to=lambda x, shape: x.broadcast_to(shape),
        trans=lambda x: x.T,
        reshape=lambda x, shape: x.reshape(shape),
        abs=torch.abs,
        maximum=lambda x, y: torch.fmax(x, y) if x.is_floating_point() else torch.maximum(x, y),
        minimum=lambda x, y: torch.fmin(x, y) if x.is_floating_point() else torch.minimum(x, y),
        sum=_sum,
        max=_extreme(lambda x, y: torch.fmax(x, y)),
        min=_extreme(lambda x, y: torch.fmin(x, y)),
        argmax=_argmax,
        cumsum=_cumsum,
        dot=_dot,
    )


def run(source: str, buffers: list[torch.Tensor], scalars: list[int], programs: int) -> list[int]:
    """Runs the function `kernel` of `source` for each program in turn and changes the buffers as it does.

    Returns: for each buffer, one past the last element that was read or written.
    Raises: Rejected.
    """
    memories = [Memory(buffer) for buffer in buffers]
    for program in range(programs):
        scope: dict[str, Any] = {"tl": _language(program), "range": _count_turns, "min": builtins.min}
        exec(source, scope)
        with _Exact():
            scope["kernel"](*(Pointer(memory) for memory in memories), *scalars)
    return [memory.end for memory in memories]
