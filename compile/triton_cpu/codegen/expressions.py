"""What the generator knows of a value at one chunk of 16 lanes.

A value is the same in all lanes (uniform), grows by a fixed step from lane to lane (affine), is a mask whose first n
lanes are set (below), or a vector. The first three are scalars in C++: addresses stay scalar, and a load whose address
is affine with step 1 is one instruction.
"""

import math
from dataclasses import dataclass
from typing import Literal

from vllm_triton.compile.triton_cpu.codegen.types import LANES, UNSIGNED, register, vector

Kind = Literal["uniform", "affine", "below", "vector"]


@dataclass(frozen=True, eq=False)
class Expression:
    """text: a C++ scalar (uniform: the value; affine: lane 0; below: how many lanes, int64_t) or vector.

    element: TTIR's element.
    level: number of loops around the place where the text may stand.
    step: affine: C++ scalar added from lane to lane.
    base: of a pointer: the C++ address of element 0, uniform; `text` then counts elements of the pointee. None where
        the text itself is the address.
    start: affine, below: the same at the first chunk of the loop along the lanes, if each chunk adds (below: takes
        away) what its 16 lanes span.
    multiple: of an integer: lane 0 is known to be zero or a positive multiple of this; 0 where nothing is known. Sums
        and products are taken not to overflow, as an index that did would be out of range.
    """

    text: str
    element: str
    level: int
    kind: Kind = "uniform"
    step: str = "0"
    base: str | None = None
    start: "Start | None" = None
    multiple: int = 0

    @property
    def is_uniform(self) -> bool:
        return self.kind == "uniform"

    @property
    def is_row(self) -> bool:
        """Of a pointer: whether its lanes are neighbours in memory."""
        return self.kind == "affine" and self.step == "1" and self.base is not None


@dataclass(frozen=True)
class Start:
    """text: C++ scalar that can stand outside of the loop along the lanes, at depth `level`."""

    text: str
    level: int

    def combined(self, template: str, other: Expression) -> "Start | None":
        """With a scalar, if that too is known outside of the loop. template: C++ with {0} for this, {1} for it."""
        if other.kind == "below":
            return Start(template.format(self.text, other.start.text), self.level) if other.start else None
        return Start(template.format(self.text, other.text), self.level) if other.level <= self.level else None


def uniform(text: str, element: str, level: int = 0, multiple: int = 0) -> Expression:
    return Expression(text, element, level, multiple=multiple)


def constant(text: str, element: str, value: object) -> Expression:
    """A number whose value is known. Zero is a multiple of everything: of a power of two that none exceeds."""
    known = value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
    return uniform(text, element, multiple=0 if known is None else known or 1 << 62)


def as_vector(expression: Expression) -> str:
    """The 16 lanes as a C++ vector."""
    lane = register(expression.element)
    if expression.kind == "vector":
        return expression.text
    if expression.kind == "below":
        return f"tcpu::lanes_below({expression.text})"
    if expression.element == "i1":
        return f"tcpu::splat<int32_t>(-int32_t({expression.text}))"
    if expression.kind == "affine":
        steps = f"tcpu::iota<{lane}>()"
        if expression.step != "1":
            steps = f"({steps} * tcpu::splat<{lane}>({expression.step}))"
        return f"(tcpu::splat<{lane}>({expression.text}) + {steps})"
    return f"tcpu::splat<{lane}>({expression.text})"


def as_bits(mask: Expression) -> str:
    """A mask as the low 16 bits of a uint32_t."""
    if mask.kind == "below":
        return f"tcpu::bits_below({mask.text})"
    if mask.is_uniform:
        return f"(({mask.text}) ? 0xFFFFu : 0u)"
    return f"tcpu::movemask({mask.text})"


def add(left: Expression, right: Expression) -> Expression:
    """Integer sum, affine where it can be."""
    return _linear("+", left, right)


def subtract(left: Expression, right: Expression) -> Expression:
    return _linear("-", left, right)


def _linear(sign: str, left: Expression, right: Expression) -> Expression:
    level, element = max(left.level, right.level), left.element
    if "vector" in (left.kind, right.kind) or element == "i1":
        return Expression(f"({as_vector(left)} {sign} {as_vector(right)})", element, level, "vector")
    text = f"({left.text} {sign} {right.text})"
    multiple = math.gcd(left.multiple, right.multiple) if sign == "+" and left.multiple and right.multiple else 0
    if left.is_uniform and right.is_uniform:
        return Expression(_wrapped(text, left, right, sign), element, level, multiple=multiple)
    step = left.step if right.step == "0" else f"({left.step} {sign} {right.step})"
    step = {"(0 + 1)": "1"}.get(step, step)
    start = None
    if right.is_uniform and left.start is not None:
        start = left.start.combined(f"({{0}} {sign} {{1}})", right)
    elif left.is_uniform and right.start is not None:
        start = right.start.combined(f"({{1}} {sign} {{0}})", left)
    return Expression(text, element, level, "affine", step, start=start, multiple=multiple)


def _wrapped(text: str, left: Expression, right: Expression, sign: str) -> str:
    """C++ widens small integers; the result has the operands' width."""
    return f"{register(left.element)}{text}" if left.element in ("i8", "i16") else text


def multiply(left: Expression, right: Expression) -> Expression:
    level, element = max(left.level, right.level), left.element
    if right.is_uniform and left.kind == "affine":
        step = right.text if left.step == "1" else f"({left.step} * {right.text})"
        return Expression(f"({left.text} * {right.text})", element, level, "affine", step)
    if left.is_uniform and right.kind == "affine":
        return multiply(right, left)
    if left.is_uniform and right.is_uniform:
        text, multiple = f"({left.text} * {right.text})", left.multiple * right.multiple
        return Expression(_wrapped(text, left, right, "*"), element, level, multiple=multiple)
    return Expression(f"({as_vector(left)} * {as_vector(right)})", element, level, "vector")


def divide(left: Expression, divisor: int, remainder: bool) -> Expression | None:
    """A quotient or remainder of neighbours by a constant, where a chunk crosses no multiple of it; else None."""
    if left.kind != "affine" or left.step != "1" or left.multiple % LANES or not left.multiple or divisor % LANES:
        return None
    if remainder:
        text, multiple = f"({left.text} % {divisor})", math.gcd(left.multiple, divisor)
        return Expression(text, left.element, left.level, "affine", "1", multiple=multiple)
    return Expression(f"({left.text} / {divisor})", left.element, left.level, multiple=1)


def below(predicate: str, left: Expression, right: Expression) -> Expression | None:
    """A signed comparison of an affine index of step 1 with a limit as a number of lanes, or None."""
    if predicate in ("sgt", "sge"):
        left, right = right, left
        predicate = {"sgt": "slt", "sge": "sle"}[predicate]
    if predicate not in ("slt", "sle") or left.kind != "affine" or left.step != "1" or not right.is_uniform:
        return None
    extra = " + 1" if predicate == "sle" else ""
    text = f"(int64_t({right.text}) - int64_t({left.text}){extra})"
    start = left.start.combined(f"(int64_t({{1}}) - int64_t({{0}}){extra})", right) if left.start else None
    return Expression(text, "i1", max(left.level, right.level), "below", start=start)


def both(left: Expression, right: Expression) -> Expression:
    """Conjunction of two masks."""
    if "true" in (left.text, right.text):
        return right if left.text == "true" else left
    level = max(left.level, right.level)
    if left.is_uniform and right.is_uniform:
        return Expression(f"({left.text} && {right.text})", "i1", level)
    if left.kind == right.kind == "below":
        start = left.start.combined("std::min<int64_t>({0}, {1})", right) if left.start else None
        return Expression(f"std::min<int64_t>({left.text}, {right.text})", "i1", level, "below", start=start)
    if {left.kind, right.kind} == {"below", "uniform"}:
        count, condition = (left, right) if left.kind == "below" else (right, left)
        start = count.start.combined("(({1}) ? {0} : int64_t(0))", condition) if count.start else None
        return Expression(f"(({condition.text}) ? {count.text} : int64_t(0))", "i1", level, "below", start=start)
    return Expression(f"({as_vector(left)} & {as_vector(right)})", "i1", level, "vector")


def unsigned(text: str, element: str, is_vector: bool) -> str:
    name = UNSIGNED[element]
    return f"((tcpu::vec<{name}>)({text}))" if is_vector else f"{name}({text})"


def signed(text: str, element: str, is_vector: bool) -> str:
    return f"(({vector(element)})({text}))" if is_vector else f"{register(element)}({text})"


def lane_indices(flat: Expression, shape: tuple[int, ...]) -> list[Expression]:
    """The index in each axis of element number `flat` of a row-major tile whose sizes are powers of two."""
    indices, stride = [], 1
    for extent in shape:
        stride *= extent
    total = stride
    for extent in shape:
        stride //= extent
        before = total // (stride * extent)
        indices.append(_digit(flat, stride, extent, before))
    return indices


def _digit(flat: Expression, stride: int, extent: int, before: int) -> Expression:
    """flat // stride % extent; `before` is the product of the sizes of the axes before."""
    if extent == 1:
        return uniform("0", "i32")
    if flat.is_uniform:
        return Expression(f"({flat.text} / {stride} % {extent})", "i32", flat.level)
    if stride == 1 and before == 1:
        return flat
    aligned = flat.kind == "affine" and flat.step == "1"
    # A chunk begins at a multiple of 16, so it does not leave a run of 16 or more equal indices, nor such a row.
    if aligned and stride >= LANES:
        return Expression(f"({flat.text} / {stride} % {extent})", "i32", flat.level)
    if aligned and stride == 1 and extent >= LANES:
        return Expression(f"({flat.text} % {extent})", "i32", flat.level, "affine", "1")
    shift = stride.bit_length() - 1
    return Expression(f"(({as_vector(flat)} >> {shift}) & {extent - 1})", "i32", flat.level, "vector")
