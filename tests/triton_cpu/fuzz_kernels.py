"""Random small kernels as Python source: loops, branches, masks, loads and stores of every shape and stride."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int8", "int16", "int64")
EXTENTS = (16, 32, 1, 2, 4, 8, 64)
# Around whole chunks of 16, around nothing, and beyond every tile.
LIMITS = (16, 0, 1, 17, 15, 32, -3, 5, 31, 33, 48, 64, 70, 100)
NUM_SCALARS = 4
# Elements of a program in each buffer; the first lie before the place where its pointer stands.
SPAN, MARGIN = 1 << 14, 1 << 11


class Choices(Protocol):
    def integer(self, low: int, high: int) -> int: ...
    def choice(self, options: Sequence[Any]) -> Any: ...


@dataclass(frozen=True)
class Tile:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """source: a function `kernel` of buffers x0, x1, ... and scalars n0 to n3, without its decorator."""

    source: str
    dtypes: list[str]
    scalars: list[int]
    programs: int
    seed: int
    specials: bool

    def buffers(self) -> list[torch.Tensor]:
        """Whole numbers from -2 to 2, and, where asked for, NaN and infinity among the floats."""
        generator = torch.Generator().manual_seed(self.seed)
        made = []
        for dtype in self.dtypes:
            size = SPAN * self.programs
            values = torch.randint(-2, 3, (size,), generator=generator).to(getattr(torch, dtype))
            if self.specials and dtype in FLOATS:
                chosen = torch.rand(size, generator=generator)
                for number, special in enumerate((float("nan"), float("inf"), -float("inf"))):
                    values[(chosen > number * 0.005) & (chosen < (number + 1) * 0.005)] = special
            made.append(values)
        return made


class Generator:
    def __init__(self, choices: Choices):
        self.pick = choices
        self.lines: list[str] = []
        self.indent = 1
        self.names = 0
        self.tiles: list[Tile] = []
        self.pointers: list[Tile] = []  # dtype: of the pointee
        self.counters: list[str] = []
        self.extents = [self.choice(EXTENTS) for _ in range(self.choice((2, 3)))]
        self.dtypes = [self.choice(FLOATS), self.choice(INTEGERS), self.choice(FLOATS + INTEGERS)]
        self.buffers = list(self.dtypes)

    def program(self) -> Program:
        for extent in sorted(set(self.extents)):
            self.emit(f"r{extent} = tl.arange(0, {extent})")
        for _ in range(self.integer(1, 2)):
            self.load()
        for _ in range(self.integer(1, 3)):
            self.accumulator()
        if self.chance(50):
            self.pointer()
        for _ in range(self.integer(1, 3)):
            self.statement(0)
        self.loop(0)
        for _ in range(self.integer(0, 2)):
            self.statement(0)
        for tile in [tile for tile in self.tiles if tile.name.startswith("acc")] + self.tiles[-2:]:
            self.keep(tile)
        buffers = [f"x{number}" for number in range(len(self.buffers))]
        scalars = [f"n{number}" for number in range(NUM_SCALARS)]
        head = [f"def kernel({', '.join([*buffers, *scalars])}):"]
        head += [f"    {name} = {name} + (tl.program_id(0) * {SPAN} + {MARGIN})" for name in buffers]
        return Program(
            "\n".join([*head, *self.lines, ""]),
            self.buffers,
            [self.choice(LIMITS) for _ in scalars],
            self.choice((1, 1, 2)),
            self.integer(0, 999),
            self.chance(40),
        )

    # Choices

    def integer(self, low: int, high: int) -> int:
        return self.pick.integer(low, high)

    def choice(self, options: Sequence[Any]) -> Any:
        return self.pick.choice(options)

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent

    def shape(self) -> tuple[int, ...]:
        return tuple(self.choice(self.extents) for _ in range(self.choice((2, 1, 2))))

    # Text

    def emit(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def new(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def name(self, text: str, shape: tuple[int, ...], dtype: str, prefix: str = "t") -> Tile:
        tile = Tile(self.new(prefix), shape, dtype)
        self.emit(f"{tile.name} = {text}")
        self.tiles.append(tile)
        return tile

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """What is named inside is not known outside."""
        self.emit(head)
        kept = [list(names) for names in (self.tiles, self.pointers, self.counters)]
        self.indent += 1
        yield
        for tile in self.tiles[len(kept[0]) :]:
            if self.chance(30):
                self.keep(tile)
        self.indent -= 1
        self.tiles, self.pointers, self.counters = kept

    # Expressions

    def limit(self) -> str:
        """A scalar integer."""
        options = [*(f"n{number}" for number in range(NUM_SCALARS)), *self.counters]
        text = self.choice([*options, str(self.choice(LIMITS))])
        if self.counters and self.chance(40):
            counter, scale = self.choice(self.counters), self.choice((1, 16, 32))
            return f"({text} - {counter} * {scale})"
        if self.chance(10):
            return f"min({text}, {self.choice(options)})"
        return text

    def index(self, extent: int) -> str:
        """One axis' places."""
        text = f"r{extent}"
        if self.counters and self.chance(50):
            return f"({self.choice(self.counters)} * {self.choice((1, extent, 16))} + {text})"
        other = self.choice(("", "", "", f"({extent - 1} - {text})", f"({text} + {self.choice((1, 16))})"))
        return other or text

    @staticmethod
    def along(text: str, axis: int, rank: int) -> str:
        if rank == 1:
            return text
        return f"{text}[:, None]" if axis == 0 else f"{text}[None, :]"

    def mask(self, shape: tuple[int, ...], depth: int = 1) -> str:
        """Of a shape that broadcasts to `shape`."""
        terms = []
        for axis, extent in enumerate(shape):
            if self.chance(65):
                place = self.along(self.index(extent), axis, len(shape))
                form = self.choice(("({0} < {1})", "({0} < {1})", "({0} <= {1})", "({1} > {0})", "({0} >= {1})"))
                terms.append(form.format(place, self.limit()))
        if len(shape) == 2 and self.chance(15):
            rows, columns = self.along(f"r{shape[0]}", 0, 2), self.along(f"r{shape[1]}", 1, 2)
            terms.append(self.choice((f"({rows} >= {columns})", f"({rows} + {columns} < {self.limit()})")))
        if depth and self.chance(15):
            dtype = self.choice(self.dtypes)
            terms.append(f"({self.tile(shape, dtype, 0)} > 0)")
        if not terms or self.chance(5):
            terms.append(f"({self.limit()} > {self.choice((0, 16))})")
        text = f"({' & '.join(terms)})" if self.chance(90) else f"({' | '.join(terms)})"
        return f"(~{text})" if self.chance(5) and "r" in text else text

    def address(self, buffer: str, shape: tuple[int, ...], to_store: bool) -> str:
        places = [self.along(self.index(extent), axis, len(shape)) for axis, extent in enumerate(shape)]
        wide = self.choice((shape[-1], 64, 65, 100))
        if len(shape) == 1:
            steps = [self.choice((1, 1, 2, 3) if to_store else (1, 1, 2, 3, 0))]
        else:
            row_major, column_major = [wide, 1], [1, wide]
            steps = self.choice((row_major, row_major, column_major, [wide * 2, 2]))
            if not to_store and self.chance(10):
                steps = self.choice(([0, 1], [1, 0], [1, 1]))
        return " + ".join([buffer, *(f"{place} * {step}" for place, step in zip(places, steps, strict=True))])

    def constant(self, dtype: str) -> str:
        number = self.choice((0, 1, -1, 2, 3))
        return f"{number}.0" if dtype in FLOATS else str(number)

    def tile(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        """An expression of this shape and type."""
        known = [tile.name for tile in self.tiles if tile.shape == shape and tile.dtype == dtype]
        if known and (depth == 0 or self.chance(30)):
            return self.choice(known[-5:])
        if depth == 0:
            return self.leaf(shape, dtype)
        forms: list[Callable[..., str]] = [self.binary, self.binary, self.unary, self.select, self.cast, self.spread]
        forms += [self.turned, self.reduced, self.leaf]
        return self.choice(forms)(shape, dtype, depth - 1)

    def leaf(self, shape: tuple[int, ...], dtype: str, depth: int = 0) -> str:
        sources = [buffer for buffer, element in enumerate(self.buffers) if element == dtype]
        if sources and self.chance(60):
            return self.loading(f"x{self.choice(sources)}", shape, dtype)
        if self.chance(30):
            place = self.along(f"(r{shape[-1]} & 3)", len(shape) - 1, len(shape))
            return f"(tl.full({shape}, 1, tl.{dtype}) + {place}.to(tl.{dtype}))"
        return f"tl.full({shape}, {self.constant(dtype)}, tl.{dtype})"

    def binary(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        left, right = self.tile(shape, dtype, depth), self.tile(shape, dtype, self.choice((0, depth)))
        if self.chance(15):
            right = self.constant(dtype)
        forms = ["({} + {})", "({} - {})", "({} * {})"]
        if right[0].isalpha():
            forms += ["tl.maximum({}, {})", "tl.minimum({}, {})"]
        if dtype in INTEGERS:
            forms += ["({} & {})", "({} ^ {})", "({} | {})", "({} << ({} & 3))", "({} >> ({} & 3))"]
        text = self.choice(forms).format(left, right)
        return f"{text}.to(tl.bfloat16)" if text.startswith("tl.") and dtype == "bfloat16" else text

    def unary(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        form = self.choice(("(-{})", "tl.abs({})", "(-{})" if dtype in FLOATS else "(~{})"))
        return form.format(self.tile(shape, dtype, depth))

    def select(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        yes, no = self.tile(shape, dtype, depth), self.tile(shape, dtype, 0)
        return f"tl.where({self.mask(shape, 0)}, {yes}, {self.choice((no, self.constant(dtype)))})"

    def cast(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        source = self.choice(self.dtypes)
        text = self.tile(shape, source, depth)
        if source in INTEGERS and dtype in FLOATS:
            text = f"({text} & 7)"
        return f"{text}.to(tl.{dtype})"

    def spread(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        """A row or a column, repeated."""
        if len(shape) == 1:
            return self.tile(shape, dtype, depth)
        axis = self.integer(0, 1)
        return f"tl.broadcast_to({self.along(self.tile((shape[axis],), dtype, depth), axis, 2)}, {shape})"

    def turned(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        if len(shape) == 1:
            return self.tile(shape, dtype, depth)
        text = self.tile(shape[::-1], dtype, depth)
        return f"tl.trans({text})" if self.chance(70) else f"tl.reshape({text}, {shape})"

    def reduced(self, shape: tuple[int, ...], dtype: str, depth: int) -> str:
        """From one axis more, in a type that Triton's reductions keep."""
        if len(shape) == 2:
            if dtype in ("int32", "float32") and self.chance(50):
                return f"tl.cumsum({self.tile(shape, dtype, depth)}, {self.integer(0, 1)}, reverse={self.chance(40)})"
            return self.tile(shape, dtype, depth)
        wide = "float32" if dtype in FLOATS else "int64" if dtype == "int64" else "int32"
        axis, extent = self.integer(0, 1), self.choice(self.extents)
        text = self.tile((extent, *shape) if axis == 0 else (*shape, extent), dtype, depth)
        if wide != dtype:
            text = f"{text}.to(tl.{wide})"
        function = self.choice(("sum", "sum", "max", "min", "argmax" if wide == "int32" else "sum"))
        result = f"tl.{function}({text}, axis={axis})"
        return result if wide == dtype else f"{result}.to(tl.{dtype})"

    def loading(self, buffer: str, shape: tuple[int, ...], dtype: str) -> str:
        pointers = [pointer.name for pointer in self.pointers if (pointer.shape, pointer.dtype) == (shape, dtype)]
        place = self.choice(pointers) if pointers and self.chance(70) else self.address(buffer, shape, to_store=False)
        if self.chance(15):
            return f"tl.load({place})"
        known = [tile.name for tile in self.tiles if tile.shape == shape and tile.dtype == dtype]
        other = self.choice([self.constant(dtype), self.constant(dtype), "0", *known[-1:]])
        return f"tl.load({place}, mask={self.mask(shape)}, other={other})"

    # Statements

    def statement(self, depth: int) -> None:
        plain = [self.load, self.load, self.compute, self.compute, self.update, self.store, self.product, self.total]
        nested = [self.loop, self.branch, self.repeat] if depth < 2 else []
        form = self.choice([*plain, *nested])
        form(depth) if form in nested else form()

    def load(self) -> None:
        number = self.integer(0, len(self.dtypes) - 1)
        shape, dtype = self.shape(), self.dtypes[number]
        self.name(self.loading(f"x{number}", shape, dtype), shape, dtype)

    def compute(self) -> None:
        shape, dtype = self.shape(), self.choice(self.dtypes)
        self.name(self.tile(shape, dtype, 2), shape, dtype)

    def update(self) -> None:
        tile = self.choice(self.tiles)
        form = self.choice(("{0} + {1}", "{0} + {1}", "{1} - {0}", "tl.where({2}, {1}, {0})", "{1}"))
        text = self.tile(tile.shape, tile.dtype, self.choice((0, 1, 2)))
        self.emit(f"{tile.name} = {form.format(tile.name, text, self.mask(tile.shape, 0))}")

    def store(self) -> None:
        number = self.integer(0, len(self.dtypes) - 1)
        shape = self.shape()
        value = self.tile(shape, self.dtypes[number], 1)
        place = self.address(f"x{number}", shape, to_store=True)
        mask = f", mask={self.mask(shape)}" if self.chance(80) else ""
        self.emit(f"tl.store({place}, {value}{mask})")

    def product(self) -> None:
        rows, depth, columns = (self.choice(self.extents) for _ in range(3))
        dtype = self.choice([dtype for dtype in self.dtypes if dtype in (*FLOATS, "int8")])
        total = "int32" if dtype == "int8" else "float32"
        left, right = self.tile((rows, depth), dtype, 1), self.tile((depth, columns), dtype, 1)
        found = [tile for tile in self.tiles if tile.shape == (rows, columns) and tile.dtype == total]
        if found and self.chance(80):
            name = self.choice(found).name
            product = f'tl.dot({left}, {right}, {{}}, input_precision="ieee")'
            zeros = f"tl.full({(rows, columns)}, 0, tl.{total})"
            text = product.format(name) if self.chance(70) else f"{name} + {product.format(zeros)}"
            self.emit(f"{name} = {text}")
            return
        addend = self.tile((rows, columns), total, 0)
        self.name(f'tl.dot({left}, {right}, {addend}, input_precision="ieee")', (rows, columns), total)

    def total(self) -> None:
        """A reduction to a scalar, back into a tile."""
        dtype = self.choice([dtype for dtype in (*self.dtypes, "int32", "float32") if dtype[-2:] in ("32", "64")])
        shape, target = self.shape(), self.shape()
        scalar = f"tl.{self.choice(('sum', 'max'))}({self.tile(shape, dtype, 1)})"
        self.name(f"({self.tile(target, dtype, 0)} + {scalar})", target, dtype)

    def accumulator(self) -> None:
        shape = tuple(self.extents[:2]) if self.chance(60) else self.shape()
        dtype = self.choice(("float32", "float32", "int32", *self.dtypes))
        self.name(f"tl.full({shape}, {self.constant(dtype)}, tl.{dtype})", shape, dtype, "acc")

    def pointer(self) -> None:
        number, shape = self.integer(0, len(self.dtypes) - 1), self.shape()
        pointer = Tile(self.new("p"), shape, self.dtypes[number])
        self.emit(f"{pointer.name} = {self.address(f'x{number}', shape, to_store=False)}")
        self.pointers.append(pointer)

    def body(self, depth: int) -> None:
        pointers = list(self.pointers)
        for _ in range(self.integer(1, 4)):
            self.statement(depth + 1)
        self.choice((self.update, self.product))()
        if pointers and self.chance(70):
            self.emit(f"{self.choice(pointers).name} += {self.choice((16, 1, 32, 64, 100))}")

    def loop(self, depth: int) -> None:
        counter, step = self.new("i"), self.choice((1, 1, 16, 32, 3))
        low = self.choice(("0", "0", "0", "0", "1", "n3"))
        high = self.limit() if step > 3 or self.chance(20) else str(self.integer(1, 4))
        with self.block(f"for {counter} in range({low}, {high}, {step}):"):
            self.counters.append(counter)
            self.body(depth)

    def repeat(self, depth: int) -> None:
        counter = self.new("k")
        self.emit(f"{counter} = 0")
        with self.block(f"while ({counter} < {self.choice((2, 3, 1, 0))}) & ({counter} * 16 < {self.limit()}):"):
            self.counters.append(counter)
            self.body(depth)
            self.emit(f"{counter} += 1")

    def branch(self, depth: int) -> None:
        with self.block(f"if {self.limit()} > {self.choice((0, 16, 33))}:"):
            self.update()
            self.statement(depth + 1)
        if self.chance(50):
            with self.block("else:"):
                self.update()

    def keep(self, tile: Tile) -> None:
        """Stores a tile whole, to a buffer of its own."""
        number = len(self.buffers)
        self.buffers.append(tile.dtype)
        places = [self.along(f"r{extent}", axis, len(tile.shape)) for axis, extent in enumerate(tile.shape)]
        steps = [1] if len(tile.shape) == 1 else [tile.shape[1], 1]
        text = " + ".join(f"{place} * {step}" for place, step in zip(places, steps, strict=True))
        self.emit(f"tl.store(x{number} + {text}, {tile.name})")
