"""The contract of an op: its shapes, dtypes and mutations, written once.

Checks, the torch schema, the fake implementation, the property tests, benchmark inputs and roofline figures are all
read from it.

A shape is a string of space-separated sizes: a name ("T"), a number ("2"), a multiple of a name ("2*I"), a name plus
a number ("B+1"), or the name of an axis that may be missing ("H?", of one argument and the results). The first plain
occurrence of a name binds it; every other occurrence must agree. `ops/README.md` has the glossary of names.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from vllm_triton.ops.errors import DTypeError, ShapeError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTS = (torch.int32, torch.int64)
# What holds values that are to be multiplied by a scale in float32.
QUANTIZED = (torch.float8_e4m3fn, torch.int8)

Dims = dict[str, int]


@dataclass(frozen=True)
class Size:
    """One size of a shape string: `factor * name + offset`, or the number `offset` where name is None.

    may_miss: the axis may be missing; then the name stays unbound.
    """

    text: str
    name: str | None
    factor: int = 1
    offset: int = 0
    may_miss: bool = False

    @classmethod
    def parse(cls, text: str) -> "Size":
        if text.isdigit():
            return cls(text, None, 0, int(text))
        if "*" in text:
            factor, name = text.split("*")
            return cls(text, name, factor=int(factor))
        if "+" in text:
            name, offset = text.split("+")
            return cls(text, name, offset=int(offset))
        name = text.removesuffix("?")
        if not name.isidentifier():
            raise ValueError(f"a size must be a name, a number, 'k*NAME', 'NAME+k' or 'NAME?', got {text!r}")
        return cls(text, name, may_miss=name != text)

    def value(self, dims: Mapping[str, int]) -> int:
        return self.offset if self.name is None else self.factor * dims[self.name] + self.offset

    def bind(self, size: int, dims: Dims) -> bool:
        """Binds the name where it is free; says whether `size` fits."""
        if self.name is not None and self.name not in dims:
            if size < self.offset or (size - self.offset) % self.factor != 0:
                return False
            dims[self.name] = (size - self.offset) // self.factor
            return True
        return size == self.value(dims)


@dataclass(frozen=True)
class Tensor:
    """A tensor argument or result.

    Args:
        shape: shape string, see the module's docstring.
        dtype: the dtypes allowed, or the name of the argument whose dtype it has, or that is the dtype.
        mutated: written in place.
        optional: may be None.
        contiguous: the last dimension has stride 1.
        values: for the property tests and benchmarks: (dims, generator) -> a tensor of this shape; the default is
            normally distributed, or all zeros for integers.
    """

    shape: str
    dtype: tuple[torch.dtype, ...] | str
    mutated: bool = False
    optional: bool = False
    contiguous: bool = True
    values: Callable[[Dims, torch.Generator], torch.Tensor] | None = None

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(Size.parse(text) for text in self.shape.split())

    def sizes_of(self, value: torch.Tensor) -> tuple[Size, ...]:
        """The sizes of this value's axes: without those that may be missing where it has fewer axes."""
        if value.dim() == len(self.sizes):
            return self.sizes
        return tuple(size for size in self.sizes if not size.may_miss)

    def shape_in(self, dims: Mapping[str, int]) -> list[int]:
        """The shape for these sizes: without the axes that may be missing and have none."""
        return [size.value(dims) for size in self.sizes if not size.may_miss or size.name in dims]


@dataclass(frozen=True)
class Scalar:
    """A number or dtype: `rule` completes "must ...", `valid` decides, `example` is what tests and benchmarks pass.

    size: the name of the size that it gives, in place of `example` where tests and benchmarks choose sizes.
    """

    type: type
    rule: str
    valid: Callable[[Any], bool]
    example: float | int | bool | torch.dtype | None
    optional: bool = False
    size: str = ""


Argument = Tensor | Scalar
_SCALAR_NAMES = {float: "float", int: "int", bool: "bool", torch.dtype: "ScalarType"}


@dataclass(frozen=True)
class Contract:
    """Everything the outside may rely on about one op.

    Args:
        name: the op's name in the registry and in torch's namespace `vllm_triton::`.
        args: its arguments in order.
        results: its results in order; empty for an op that only mutates.
        constraint: (dims) -> None or "{argument} must {rule}, got {value}" for what shape strings cannot say.
        combination: (arguments by name) -> the same, for dtypes, numbers and missing arguments that do not go together.
        defaults: values of the last arguments, where a caller leaves them out.
        derived: (dims) -> sizes of results that no shape string can say; an axis that may be missing has none.
        flops: (dims) -> floating-point operations of one call.
        bytes: (dims, itemsize of the first floating argument) -> bytes moved at least; by default every argument is
            read and every result written once.
        test_dims: (pick) -> dims, for the property tests; pick(low, high) and pick.of(*options) choose.
        bench_dims: label -> dims of real models.
        arrange: (inputs, dims, generator) -> None fills in inputs that depend on one another.
        rows: the size along which calls are independent: permuting or splitting it permutes or splits the results.
        uses_dot: the Triton kernel uses tl.dot, whose interpreter multiplies bfloat16 operands wrongly.
        uses_kv_cache: it reads or writes the KV cache; a traced forward is cut at these ops.
        inlineable: a compiler that fuses ops may take the reference instead, which is torch calls it can fuse.
    """

    name: str
    args: Mapping[str, Argument]
    results: Mapping[str, Tensor] = field(default_factory=dict)
    constraint: Callable[[Dims], str | None] | None = None
    combination: Callable[[Mapping[str, Any]], str | None] | None = None
    defaults: tuple[Any, ...] = ()
    derived: Callable[[Dims], Dims] = lambda dims: {}
    flops: Callable[[Dims], int] = lambda dims: 0
    bytes: Callable[[Dims, int], int] | None = None
    test_dims: Callable[[Any], Dims] = lambda pick: {}
    bench_dims: Mapping[str, Dims] = field(default_factory=dict)
    arrange: Callable[[dict[str, Any], Dims, torch.Generator], None] | None = None
    rows: str | None = None
    uses_dot: bool = False
    uses_kv_cache: bool = False
    inlineable: bool = False

    @cached_property
    def schema(self) -> str:
        """The torch schema, for example "(Tensor x, Tensor weight, float eps) -> Tensor"."""
        parts, aliases = [], iter("abcdefgh")
        for name, arg in self.args.items():
            mark = "?" if arg.optional else ""
            if isinstance(arg, Scalar):
                parts.append(f"{_SCALAR_NAMES[arg.type]}{mark} {name}")
            else:
                alias = f"({next(aliases)}!)" if arg.mutated else ""
                parts.append(f"Tensor{alias}{mark} {name}")
        results = ", ".join("Tensor" for _ in self.results)
        return f"({', '.join(parts)}) -> " + (results if len(self.results) == 1 else f"({results})")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: arg for name, arg in self.args.items() if isinstance(arg, Tensor)}

    @property
    def mutated(self) -> list[str]:
        return [name for name, arg in self.tensors.items() if arg.mutated]

    def outputs(self, values: tuple[Any, ...], results: Any) -> tuple[torch.Tensor, ...]:
        """What a call with these arguments returned, then the arguments that it wrote into."""
        returned = results if isinstance(results, tuple) else () if results is None else (results,)
        named = dict(zip(self.args, values, strict=True))
        return *returned, *(named[name] for name in self.mutated if named[name] is not None)

    def bind(self, values: tuple[Any, ...]) -> Dims:
        """The sizes that these arguments fix, without checking them."""
        dims: Dims = {}
        for arg, value in zip(self.args.values(), values, strict=True):
            if isinstance(arg, Scalar):
                if arg.size:
                    dims[arg.size] = value
            elif value is not None:
                for size, extent in zip(arg.sizes_of(value), value.shape, strict=True):
                    size.bind(extent, dims)
        return dims | self.derived(dims)

    def check(self, values: tuple[Any, ...]) -> Dims:
        """Raises ShapeError or DTypeError where an argument breaks the contract; returns the sizes."""
        if len(values) != len(self.args):
            names = ", ".join(self.args)
            raise DTypeError(f"{self.name}: arguments must be ({names}), got {len(values)} of them")
        dims: Dims = {}
        device = None
        named = dict(zip(self.args, values, strict=True))
        for name, arg in self.args.items():
            value = named[name]
            if value is None and arg.optional:
                continue
            if isinstance(arg, Scalar):
                self._check_scalar(name, arg, value, dims)
                continue
            if not isinstance(value, torch.Tensor):
                raise DTypeError(f"{self.name}: {name} must be a tensor, got {type(value).__name__}")
            device = device or value.device
            if value.device != device:
                raise DTypeError(f"{self.name}: {name} must be on {device}, got {value.device}")
            self._check_dtype(name, arg, value, named)
            self._check_shape(name, arg, value, dims)
        if self.constraint is not None and (problem := self.constraint(dims)) is not None:
            raise ShapeError(f"{self.name}: {problem}")
        if self.combination is not None and (problem := self.combination(named)) is not None:
            raise DTypeError(f"{self.name}: {problem}")
        return dims

    def _check_scalar(self, name: str, arg: Scalar, value: Any, dims: Dims) -> None:
        right = isinstance(value, int | float) if arg.type is float else type(value) is arg.type
        if not right:
            raise DTypeError(f"{self.name}: {name} must be {arg.type.__name__}, got {value!r}")
        if not arg.valid(value):
            raise ShapeError(f"{self.name}: {name} must {arg.rule}, got {value!r}")
        if arg.size and dims.setdefault(arg.size, value) != value:
            raise ShapeError(f"{self.name}: {name} must be {arg.size} = {dims[arg.size]}, got {value}")

    def _check_dtype(self, name: str, arg: Tensor, value: torch.Tensor, named: dict[str, Any]) -> None:
        if isinstance(arg.dtype, str):
            if value.dtype != named[arg.dtype].dtype:
                wanted = named[arg.dtype].dtype
                raise DTypeError(f"{self.name}: {name} must have the dtype of {arg.dtype}, {wanted}, got {value.dtype}")
        elif value.dtype not in arg.dtype:
            allowed = ", ".join(str(dtype) for dtype in arg.dtype)
            raise DTypeError(f"{self.name}: {name} must be of dtype {allowed}, got {value.dtype}")

    def _check_shape(self, name: str, arg: Tensor, value: torch.Tensor, dims: Dims) -> None:
        shape, sizes = value.shape, arg.sizes_of(value)
        if len(shape) != len(sizes):
            raise ShapeError(f"{self.name}: {name} must have shape [{arg.shape}], got {list(shape)}")
        for axis, size in enumerate(sizes):
            if not size.bind(shape[axis], dims):
                known = f" = {size.value(dims)}" if size.name in dims else ""
                raise ShapeError(
                    f"{self.name}: {name} must have size {size.text}{known} in axis {axis}, got {list(shape)}"
                )
        if arg.contiguous and shape and shape[-1] > 1 and value.stride(-1) != 1:
            raise ShapeError(
                f"{self.name}: {name} must be contiguous in its last dimension, got strides {value.stride()}"
            )

    def fake(self, *values: Any) -> Any:
        """Results of the right shape, dtype and device without values: the op's fake implementation."""
        like = next(value for value in values if isinstance(value, torch.Tensor))
        results = [like.new_empty(shape, dtype=dtype) for shape, dtype in self._results_of(values)]
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def _results_of(self, values: tuple[Any, ...]) -> Iterator[tuple[list[int], torch.dtype]]:
        """Shape and dtype of each result."""
        dims, named = self.bind(values), dict(zip(self.args, values, strict=True))
        for result in self.results.values():
            of = named[result.dtype] if isinstance(result.dtype, str) else result.dtype[0]
            yield result.shape_in(dims), of.dtype if isinstance(of, torch.Tensor) else of

    def bytes_moved(self, values: tuple[Any, ...]) -> int:
        """Bytes that one call must move at least."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if self.bytes is not None:
            floats = [tensor for tensor in tensors if tensor.is_floating_point()]
            return self.bytes(self.bind(values), (floats or tensors)[0].element_size())
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return moved + sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._results_of(values))
