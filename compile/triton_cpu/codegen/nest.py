"""A nest of loops over one tile, and the code that stands at each depth of it."""

import math
from dataclasses import dataclass, field, replace

from vllm_triton.compile.triton_cpu.codegen import expressions
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, Start, as_bits, uniform
from vllm_triton.compile.triton_cpu.codegen.types import LANES, strides

# Steps of a nest's unrolled loops together.
MOST_UNROLLED = 32
_SIMPLE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")


class Names:
    """Fresh C++ names."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"


@dataclass
class _Loop:
    variable: str
    extent: int
    step: int

    @property
    def steps(self) -> int:
        return self.extent // self.step


@dataclass
class Nest:
    """Loops over a tile of `shape`, 16 lanes at a time along one axis.

    A tile with at least 16 elements in its last axis longer than 1 is walked row by row: the indices of the other axes
    are scalars. Any other tile is walked as one flat row, and indices are vectors.

    order: axes from the outermost loop to the innermost; by default row-major. Only for tiles that are walked by rows.
    unroll: whether the innermost loops are unrolled, as far as few steps result.
    parts: chunks that one turn of the loop along the lanes takes, where there are many; `part` counts them.
    lane_axis: the axis along which the lanes lie; None for a flat walk.
    valid: lanes of the only chunk that exist, for tiles of fewer than 16 elements.

    The body of the loop along the lanes is compiled three times, for chunks in which every mask of `limits` holds in
    all lanes, in some, and in none: the first has no masks, and of the last little is left.
    """

    shape: tuple[int, ...]
    names: Names
    order: list[int] | None = None
    unroll: bool = False
    parts: int = 1
    indices: list[Expression] = field(init=False)
    lane_axis: int | None = field(init=False)
    valid: int | None = field(init=False, default=None)
    lane_loop: _Loop | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.loops: list[_Loop] = []
        self.limits: list[str] = []
        self.memo: dict[object, Expression] = {}
        self.part: str | None = None
        opening: list[str] = []
        size = 1
        for extent in self.shape:
            size *= extent
        self.lane_axis = lane_axis(self.shape)
        if self.lane_axis is None:
            self._walk_flat(size)
        else:
            self._walk_rows()
        if self.part is not None:
            first, lanes = self.loops[-2].variable, self.indices[self.lane_axis or 0].text
            opening.append(f"const int32_t {lanes} = {first} + {LANES} * {self.part};")
        self.before: list[list[str]] = [[] for _ in range(len(self.loops))] + [opening]
        self.after: list[list[str]] = [[] for _ in range(len(self.loops) + 1)]

    def _walk_flat(self, size: int) -> None:
        if size < LANES:
            self.valid = size
        if size <= LANES:
            flat = Expression("0", "i32", 0, "affine", "1")
        else:
            flat = Expression(self._loop(size, LANES), "i32", 1, "affine", "1")
        self.indices = expressions.lane_indices(flat, self.shape)
        self.flat = flat

    def _walk_rows(self) -> None:
        order = self.order or list(range(len(self.shape)))
        found: dict[int, Expression] = {}
        for axis in order:
            extent = self.shape[axis]
            if extent == 1:
                found[axis] = uniform("0", "i32")
            elif axis == self.lane_axis:
                start = Start("0", len(self.loops))
                if extent == LANES:
                    found[axis] = Expression("0", "i32", len(self.loops), "affine", "1", start=start, multiple=LANES)
                    continue
                variable = self._lane_loop(extent)
                found[axis] = Expression(variable, "i32", len(self.loops), "affine", "1", start=start, multiple=LANES)
            else:
                found[axis] = Expression(self._loop(extent, 1), "i32", len(self.loops))
        self.indices = [found[axis] for axis in range(len(self.shape))]
        self.flat = self._number(self.indices, self.shape)

    def flat_index(self, indices: list[Expression], shape: tuple[int, ...] | None = None) -> Expression:
        """The row-major number of the element at `indices`."""
        if shape in (None, self.shape) and indices == self.indices:
            return self.flat
        return self._number(indices, self.shape if shape is None else shape)

    @staticmethod
    def _number(indices: list[Expression], shape: tuple[int, ...]) -> Expression:
        flat = uniform("0", "i32")
        for index, stride in zip(indices, strides(shape), strict=True):
            if index.text == "0" and index.is_uniform:
                continue
            scaled = index if stride == 1 else expressions.multiply(index, uniform(str(stride), "i32"))
            flat = scaled if flat.text == "0" and flat.is_uniform else expressions.add(flat, scaled)
        return flat

    def _lane_loop(self, extent: int) -> str:
        step = LANES * self.parts
        is_long = self.parts > 1 and extent % step == 0 and extent > step
        variable = self._loop(extent, step if is_long else LANES)
        self.lane_loop = self.loops[-1]
        if not is_long:
            return variable
        self.part = self._loop(self.parts, 1)
        return self.names.new("i")

    def _loop(self, extent: int, step: int) -> str:
        variable = self.names.new("i")
        self.loops.append(_Loop(variable, extent, step))
        return variable

    @property
    def depth(self) -> int:
        return len(self.loops)

    def assign(self, expression: Expression) -> Expression:
        """Gives a computed text a name, at the shallowest depth where it can stand."""
        if set(expression.text) <= _SIMPLE:
            return expression
        name = self.names.new("t")
        self.before[expression.level].append(f"const auto {name} = {expression.text};")
        return replace(expression, text=name)

    @property
    def existing(self) -> str:
        """C++ bits of the lanes of a chunk that exist."""
        return f"{(1 << (LANES if self.valid is None else self.valid)) - 1}u"

    def bits(self, mask: Expression) -> str:
        """A mask as the runtime's loads and stores take it."""
        if mask.start is None or self.lane_loop is None:
            return as_bits(mask)
        if mask.start.text not in self.limits:
            self.limits.append(mask.start.text)
        return f"tcpu::first(chunk, {mask.text})"

    def condition(self, mask: Expression) -> Expression:
        """A mask as a selection takes it."""
        if mask.start is None or self.lane_loop is None:
            return mask
        return Expression(f"tcpu::lanes({self.bits(mask)})", "i1", mask.level, "vector")

    def emit(self, text: str, level: int | None = None) -> None:
        """A statement at a depth, by default in the innermost loop."""
        self.before[self.depth if level is None else level].append(text)

    def emit_after(self, text: str, level: int) -> None:
        """A statement at a depth, behind the loops inside it."""
        self.after[level].append(text)

    def walk_plainly(self) -> None:
        """Keeps the loop along the lanes one plain loop, whose body may leave the function."""
        self.lane_loop = None

    def drop_lanes(self) -> None:
        """Takes the loop along the lanes out, the innermost, with what stands in it."""
        if self.lane_loop is not None:
            assert self.loops[-1] is self.lane_loop, "the loop along the lanes is not the innermost"
            for part in (self.loops, self.before, self.after):
                part.pop()
            self.lane_loop = None

    def _unrolled(self, level: int) -> bool:
        if self.loops[level].variable == self.part:
            return True
        return self.unroll and math.prod(loop.steps for loop in self.loops[level:]) <= MOST_UNROLLED

    def lines(self) -> list[str]:
        """The nest in braces of its own."""
        return ["{", *self._from(0), "}"]

    def _from(self, level: int) -> list[str]:
        lines = list(self.before[level])
        if level < self.depth:
            loop = self.loops[level]
            inside = self._from(level + 1)
            if loop is self.lane_loop and self.limits:
                limits = ", ".join(f"int64_t({limit})" for limit in self.limits)
                head = f"tcpu::walk<{loop.extent}, {loop.step}>({{{limits}}}"
                lines.append(f"{head}, [&](auto chunk, int32_t {loop.variable}) TCPU_BODY {{")
                lines += [*inside, "});"]
            else:
                variable = loop.variable
                if self._unrolled(level):
                    lines.append(f"#pragma GCC unroll {loop.steps}")
                lines.append(f"for (int32_t {variable} = 0; {variable} < {loop.extent}; {variable} += {loop.step}) {{")
                lines += [*inside, "}"]
        return lines + self.after[level]


def lane_axis(shape: tuple[int, ...]) -> int | None:
    """The last axis longer than 1, if it holds whole chunks of 16."""
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            return axis if shape[axis] % LANES == 0 else None
    return None
