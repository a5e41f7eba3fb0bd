"""The typed form of a kernel between TTIR's text and C++: values, operations, blocks.

It is a plain picture of the TTIR; what the generator wants to know beyond it is derived in `codegen/`: ranges in
`ranges.py`, affine indices in `expressions.py`, what becomes memory in `plan.py`.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

FLOATS = ("f8E4M3FN", "f8E5M2", "f16", "bf16", "f32", "f64")
INTEGERS = ("i1", "i8", "i16", "i32", "i64")


class UnsupportedOperationError(NotImplementedError):
    """The backend does not cover an operation, or not in this form: names it, the kernel and the source line."""


@dataclass(frozen=True)
class Type:
    """A scalar or a tensor of them; pointers have the element "ptr" and a pointee.

    shape: None for a scalar.
    """

    element: str
    shape: tuple[int, ...] | None = None
    pointee: str | None = None

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None

    @property
    def is_pointer(self) -> bool:
        return self.element == "ptr"

    @property
    def is_float(self) -> bool:
        return self.element in FLOATS

    @cached_property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        size = 1
        for extent in self.shape or ():
            size *= extent
        return size

    @property
    def scalar(self) -> "Type":
        return Type(self.element, None, self.pointee)

    def with_element(self, element: str) -> "Type":
        return Type(element, self.shape)

    def __str__(self) -> str:
        element = f"!tt.ptr<{self.pointee}>" if self.is_pointer else self.element
        return element if self.shape is None else f"tensor<{'x'.join([*map(str, self.shape), element])}>"


@dataclass(eq=False)
class Value:
    """One result of an operation, or an argument of a block; `uses` are the operations that read it."""

    name: str
    type: Type
    producer: "Operation | None" = None
    uses: list["Operation"] = field(default_factory=list)

    @property
    def constant(self) -> Any:
        """The number that it is in all lanes, a list where they differ; None where it is no constant."""
        producer = self.producer
        while producer is not None and producer.name in ("tt.splat", "tt.broadcast"):
            producer = producer.operands[0].producer
        return producer.attributes["value"] if producer is not None and producer.name == "arith.constant" else None

    @property
    def is_zero(self) -> bool:
        """Whether it is zero in all lanes, and not minus zero."""
        return self.constant == 0 and math.copysign(1, self.constant) > 0


@dataclass(eq=False)
class Operation:
    """One operation.

    name: as TTIR writes it, "arith.addi".
    words: bare words of its text, such as a comparison's predicate.
    attributes: by name; numbers, strings, lists, and for constants "value".
    successors: of a branch: the label of a block and the values it receives.
    line: "file:line" of the kernel's source, as far as the text tells.
    """

    name: str
    operands: list[Value]
    results: list[Value]
    words: list[str]
    attributes: dict[str, Any]
    regions: list["Region"]
    successors: list[tuple[str, list[Value]]]
    line: str

    @property
    def result(self) -> Value:
        assert len(self.results) == 1, f"{self.name} has {len(self.results)} results"
        return self.results[0]

    @property
    def callee(self) -> str:
        """Name of the function that a tt.call calls."""
        [symbol] = [word for word in self.words if word.startswith("@")]
        return symbol[1:].strip('"')

    def unsupported(self, what: str = "this operation") -> UnsupportedOperationError:
        types = ", ".join(str(value.type) for value in [*self.operands, *self.results])
        return UnsupportedOperationError(f"{self.line}: {self.name}({types}): the CPU backend does not cover {what}")


@dataclass(eq=False)
class Block:
    label: str
    arguments: list[Value]
    operations: list[Operation] = field(default_factory=list)

    @property
    def terminator(self) -> Operation:
        return self.operations[-1]


@dataclass(eq=False)
class Region:
    blocks: list[Block]

    @property
    def block(self) -> Block:
        assert len(self.blocks) == 1, "a structured region has one block"
        return self.blocks[0]


@dataclass(eq=False)
class Function:
    name: str
    arguments: list[Value]
    result_types: list[Type]
    body: Region
    is_public: bool


@dataclass(eq=False)
class Module:
    functions: dict[str, Function]

    @property
    def kernel(self) -> Function:
        [kernel] = [function for function in self.functions.values() if function.is_public]
        return kernel
