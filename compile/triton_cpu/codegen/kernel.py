"""The generator: walks a kernel's operations and writes C++ for each.

Scalars become variables. Tensors are computed where they are read, 16 lanes at a time (`evaluate`), unless the plan
gives them memory (`materialise`). What is a statement of its own, a store, a reduction, a loop, opens a `Nest`.
"""

from dataclasses import dataclass, replace

from vllm_triton.compile.triton_cpu.codegen import (
    atomics,
    checks,
    control,
    debugging,
    elementwise,
    expressions,
    functions,
    memory,
    products,
    rearranging,
    reductions,
    scans,
    sources,
)
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector, lane_indices, uniform
from vllm_triton.compile.triton_cpu.codegen.nest import Names, Nest
from vllm_triton.compile.triton_cpu.codegen.plan import VIEWS, Plan, is_spread
from vllm_triton.compile.triton_cpu.codegen.types import HALVES, LANES, STORAGE, WIDTH, literal, scalar_type, shape_of
from vllm_triton.compile.triton_cpu.ir import Block, Function, Operation, Type, Value

# A program's buffers live on its thread's stack.
LARGEST_FRAME = 4 << 20
_PROGRAM = {"x": "pid_x", "y": "pid_y", "z": "pid_z"}
_NUM_PROGRAMS = {"x": "num_x", "y": "num_y", "z": "num_z"}
Indices = tuple[Expression, ...]


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: row-major, contiguous, padded to whole chunks; `name` is a pointer variable."""

    name: str
    element: str
    shape: tuple[int, ...]

    @property
    def storage(self) -> str:
        return STORAGE[self.element]

    def item(self, offset: str) -> str:
        """C++ of one element as a scalar."""
        text = f"tcpu::load_scalar<{self.storage}>({self.name} + {offset})"
        return f"({text} != 0)" if self.element == "i1" else text


class Generator:
    """Writes the body of one function.

    program: the functions that it may call.
    """

    def __init__(self, function: Function, program: "functions.Program"):
        self.function = function
        self.program = program
        self.names = Names()
        self.plan = Plan(function.body)
        self.scalars: dict[Value, Expression] = {}
        self.buffers: dict[Value, Buffer] = {}
        self.sources: dict[Value, str] = {}
        self.tables: dict[Value, tuple[str, bool]] = {}
        self.declarations: list[str] = []
        self.lines: list[str] = []
        self.frame = 0
        self.streams = False

    @staticmethod
    def variable(name: str, type_: Type) -> Expression:
        """A scalar that a C++ variable holds."""
        return Expression("0", "ptr", 0, base=name) if type_.is_pointer else uniform(name, type_.element)

    # Declarations

    def declare(self, type_: Type) -> Expression:
        """A variable for a scalar of this type."""
        name = self.names.new("s")
        self.declarations.append(f"{scalar_type(type_)} {name};")
        return self.variable(name, type_)

    def assign(self, target: Expression, value: Expression, type_: Type) -> None:
        self.lines.append(f"{target.base or target.text} = {self.text(value, type_)};")

    @staticmethod
    def text(value: Expression, type_: Type) -> str:
        """A scalar in C++."""
        return memory.address(value, STORAGE[type_.pointee or "i8"]) if type_.is_pointer else value.text

    @staticmethod
    def buffer(name: str, type_: Type) -> Buffer:
        """A tensor in memory that is there already."""
        return Buffer(name, type_.element, shape_of(type_))

    def new_buffer(self, type_: Type) -> Buffer:
        element, shape = type_.element, shape_of(type_)
        size = max(type_.size, LANES)
        name = self.names.new("b")
        storage = STORAGE[element]
        self.reserve(f"alignas(64) {storage} {name}_memory[{size}]; {storage}* {name} = {name}_memory;", type_)
        return Buffer(name, element, shape)

    def reserve(self, declaration: str, type_: Type, extra: int = 0) -> None:
        """A declaration of what holds a tile of this type in memory, and so many bytes beside it."""
        self.frame += max(type_.size, LANES) * WIDTH[type_.element] + extra
        if self.frame > LARGEST_FRAME:
            raise control.unsupported_function(self.function, f"tiles of more than {LARGEST_FRAME} bytes a program")
        self.declarations.append(declaration)

    # Values

    def scalar(self, value: Value) -> Expression:
        """A scalar outside of any loop nest."""
        return self.scalars[value]

    def evaluate(self, value: Value, indices: Indices, nest: Nest) -> Expression:
        """The value at `indices`, one for each of its axes; named where that saves a repetition."""
        if not value.type.is_tensor and value in self.scalars:
            return self.scalars[value]
        key = (value, indices)
        if key not in nest.memo:
            nest.memo[key] = nest.assign(self._compute(value, indices, nest))
        return nest.memo[key]

    def _compute(self, value: Value, indices: Indices, nest: Nest) -> Expression:
        if value in self.buffers:
            return self.read(self.buffers[value], indices, nest)
        operation = value.producer
        assert operation is not None, f"{value.name} is neither computed nor in memory"
        if operation.name in VIEWS:
            return self._view(operation, value, indices, nest)
        if operation.name == "tt.load":
            return self._load(operation, indices, nest)
        if operation.name in elementwise.NAMES:
            operands = [self.operand(operand, indices, nest) for operand in operation.operands]
            if operation.name == "arith.select":
                operands[0] = nest.condition(operands[0])
            if operation.name == "arith.select" and value.type.is_pointer:
                pointee = value.type.pointee or "i8"
                operands[1:] = [memory.to_address(operand, pointee) for operand in operands[1:]]
            return elementwise.compute(operation, operands)
        raise operation.unsupported()

    def operand(self, value: Value, indices: Indices, nest: Nest) -> Expression:
        """An operand of an operation over `indices`: it may be a scalar."""
        return self.evaluate(value, indices if value.type.is_tensor else (), nest)

    def read(self, buffer: Buffer, indices: Indices, nest: Nest) -> Expression:
        """From a buffer, whose padding may be read."""
        pointer = self._place(buffer.name, buffer.shape, indices, nest)
        loaded = memory.load(memory.everywhere(pointer, buffer.element), None)
        if buffer.element == "i1" and loaded.is_uniform:
            return Expression(f"({loaded.text} != 0)", "i1", loaded.level)
        return loaded

    @staticmethod
    def _place(name: str, shape: tuple[int, ...], indices: Indices, nest: Nest) -> Expression:
        """A pointer into a row-major tile."""
        flat = memory.as_integer(nest.flat_index(list(indices), shape))
        return Expression(flat.text, "ptr", flat.level, flat.kind, flat.step, name)

    def _view(self, operation: Operation, value: Value, indices: Indices, nest: Nest) -> Expression:
        name, shape = operation.name, value.type.shape or ()
        if name in ("arith.constant", "ub.poison"):  # poison: any value will do
            number = operation.attributes.get("value", 0)
            return expressions.constant(literal(number, value.type.element), value.type.element, number)
        source = operation.operands[0] if operation.operands else value
        source_shape = source.type.shape or ()
        if name == "tt.make_range":
            start = operation.attributes["start"]
            if not start:
                return indices[0]
            return expressions.add(indices[0], expressions.constant(f"int32_t({start})", "i32", start))
        if name == "tt.splat":
            return self.evaluate(source, (), nest)
        if name == "tt.unsplat":
            return self.evaluate(source, tuple(uniform("0", "i32") for _ in source_shape), nest)
        if name == "tt.expand_dims":
            axis = operation.attributes["axis"]
            return self.evaluate(source, indices[:axis] + indices[axis + 1 :], nest)
        if name == "tt.broadcast":
            kept = tuple(
                index if extent == wide else uniform("0", "i32")
                for index, extent, wide in zip(indices, source_shape, shape, strict=True)
            )
            return self.evaluate(source, kept, nest)
        if name == "tt.trans":
            order = operation.attributes["order"]
            moved = sorted(zip(order, indices, strict=True), key=lambda pair: pair[0])
            return self.evaluate(source, tuple(index for _, index in moved), nest)
        if name == "tt.reshape":
            flat = nest.flat_index(list(indices), shape)
            return self.evaluate(source, tuple(lane_indices(flat, source_shape)), nest)
        if name == "tt.split":
            side = uniform(str(operation.results.index(value)), "i32")
            return self.evaluate(source, (*indices, side), nest)
        if name == "tt.join":
            sides = [self.evaluate(operand, indices[:-1], nest) for operand in operation.operands]
            return self._choose(indices[-1], sides)
        if name == "tt.addptr":
            pointer = self.operand(source, indices, nest)
            offset = self.operand(operation.operands[1], indices, nest)
            return memory.advance(pointer, offset, source.type.pointee or "i8")
        raise operation.unsupported()

    @staticmethod
    def _choose(index: Expression, sides: list[Expression]) -> Expression:
        """The first side where the index is 0, the second where it is 1."""
        if index.is_uniform and index.text in ("0", "1"):
            return sides[int(index.text)]
        element = sides[0].element
        level = max(index.level, *(side.level for side in sides))
        if index.is_uniform and all(side.is_uniform for side in sides):
            return Expression(f"({index.text} == 0 ? {sides[0].text} : {sides[1].text})", element, level)
        first = f"tcpu::cmp_eq({as_vector(index)}, tcpu::splat<int32_t>(0))"
        return Expression(
            f"tcpu::select({first}, {as_vector(sides[0])}, {as_vector(sides[1])})", element, level, "vector"
        )

    def _load(self, operation: Operation, indices: Indices, nest: Nest) -> Expression:
        pointer, *rest = [self.operand(operand, indices, nest) for operand in operation.operands]
        if operation.result in self.sources:
            pointer = self._place(self.sources[operation.result], shape_of(operation.result.type), indices, nest)
        pointee = operation.operands[0].type.pointee or "i8"
        mask, other = [*rest, None, None][:2]
        return memory.load(memory.access(pointer, pointee, mask, nest), other)

    def materialise(self, value: Value, buffer: Buffer | None = None) -> Buffer:
        """Computes a tensor into memory now."""
        target = buffer or self.new_buffer(value.type)
        # Along a short axis, such as the places of values in a word, much of an element's work is then a constant.
        nest = Nest(target.shape, self.names, unroll=len(target.shape) > 2)
        place = f"{target.name} + {nest.flat.text}"
        copied = self._copy(value, place, nest)
        if copied is not None:
            nest.emit(copied)
            self.lines += nest.lines()
            return target
        result, rounds = self.to_store(value, tuple(nest.indices), nest)
        if value.type.is_pointer:
            result = memory.to_address(result, value.type.pointee or "i8")
        nest.emit(f"tcpu::store<{target.storage}>({place}, {memory.stored(result, rounds)});")
        self.lines += nest.lines()
        return target

    def _copy(self, value: Value, place: str, nest: Nest) -> str | None:
        """What moves a loaded tile of small floats to a place without a look at them, or None."""
        load = value.producer
        if load is None or load.name != "tt.load" or value in self.buffers or value.type.element not in HALVES:
            return None
        pointer, *rest = [self.operand(operand, tuple(nest.indices), nest) for operand in load.operands]
        if len(rest) > 1 and not load.operands[2].is_zero:
            return None
        return memory.copy(memory.access(pointer, value.type.element, rest[0] if rest else None, nest), place)

    def to_store(self, value: Value, indices: Indices, nest: Nest) -> tuple[Expression, bool]:
        """The value at `indices`, and whether the store has to round it: then a rounding before it is left out."""
        operation = value.producer
        computed = value in self.buffers or (value, indices) in nest.memo or not value.type.is_tensor
        if not computed and operation is not None and elementwise.is_rounding(operation):
            operand = self.evaluate(operation.operands[0], indices, nest)
            if not operand.is_uniform:
                return operand, True
        return self.evaluate(value, indices, nest), False

    def in_memory(self, value: Value, reader: Operation) -> Buffer:
        """The buffer of a tensor, which it gets now if it has none."""
        if value in self.buffers:
            return self.buffers[value]
        producer = value.producer
        if producer is not None and producer.name == "tt.reshape" and value.type.is_tensor:
            # In the loops of the axes that it was computed with, no division finds out where an element lies.
            source = self.in_memory(producer.operands[0], reader)
            buffer = Buffer(source.name, source.element, shape_of(value.type))
        else:
            buffer = self.materialise(value)
        if self.plan.is_local(value, reader):  # else the reader may not run before the next one does
            self.buffers[value] = buffer
        return buffer

    # Statements

    def block(self, block: Block) -> None:
        """Every operation of a block but its terminator."""
        for operation in block.operations[:-1]:
            self.statement(operation)

    def statement(self, operation: Operation) -> None:
        name = operation.name
        if self.program.provenance is not None:
            checks.emit_check(self, operation)
        handler = _STATEMENTS.get(name)
        if handler is not None:
            handler(self, operation)
        elif name in VIEWS or name == "tt.load" or name in elementwise.NAMES:
            self._value(operation)
        else:
            raise operation.unsupported()

    def _value(self, operation: Operation) -> None:
        if operation.name == "tt.load" and operation.result.type.is_tensor:
            products.emit_load(self, operation)
        for result in operation.results:
            if result.type.is_tensor:
                if isinstance(operation.attributes.get("value"), list):
                    self.buffers[result] = self._table(operation, result)
                elif result in self.plan.buffered:
                    self.buffers[result] = self.materialise(result)
                    if is_spread(result):  # the compiler would keep it in registers and take lanes out of them
                        self.lines.append(f"tcpu::settle({self.buffers[result].name});")
                continue
            if operation.name == "arith.constant":
                number = operation.attributes["value"]
                self.scalars[result] = expressions.constant(
                    literal(number, result.type.element), result.type.element, number
                )
                continue
            nest = Nest((), self.names)
            value = self._compute(result, (), nest)
            self.lines += nest.before[0]
            target = self.declare(result.type)
            self.assign(target, value, result.type)
            self.scalars[result] = replace(target, multiple=value.multiple)

    def _table(self, operation: Operation, result: Value) -> Buffer:
        """A constant whose elements differ."""
        buffer = self.new_buffer(result.type)
        for index, number in enumerate(operation.attributes["value"]):
            text = literal(number, result.type.element)
            self.lines.append(f"tcpu::store_scalar<{buffer.storage}>({buffer.name} + {index}, {text});")
        return buffer

    def nothing(self, operation: Operation) -> None:
        """Operations that only inform or synchronise: a program is one thread."""

    def program_id(self, operation: Operation) -> None:
        names = _PROGRAM if operation.name == "tt.get_program_id" else _NUM_PROGRAMS
        axis = next(word for word in operation.words if word in names)
        self.scalars[operation.result] = uniform(names[axis], "i32", multiple=1)

    def store(self, operation: Operation) -> None:
        sources.prepare(self, operation)
        pointer, value = operation.operands[:2]
        nest = Nest(value.type.shape or (), self.names)
        indices = tuple(nest.indices)
        stored, rounds = self.to_store(value, indices if value.type.is_tensor else (), nest)
        place, *masks = [self.operand(operand, indices, nest) for operand in (pointer, *operation.operands[2:])]
        where = memory.access(place, pointer.type.pointee or "i8", masks[0] if masks else None, nest)
        streams = operation.attributes.get("cacheModifier") == "cs"
        self.streams |= streams
        text, _ = memory.store(where, stored, rounds, streams)
        nest.emit(text)
        self.lines += nest.lines()


_STATEMENTS = {
    "tt.get_program_id": Generator.program_id,
    "tt.get_num_programs": Generator.program_id,
    "tt.store": Generator.store,
    "tt.atomic_rmw": atomics.emit_atomic,
    "tt.atomic_cas": atomics.emit_atomic,
    "tt.reduce": reductions.emit_reduce,
    "tt.scan": scans.emit_scan,
    "tt.gather": rearranging.emit_gather,
    "tt.histogram": rearranging.emit_histogram,
    "tt.cat": rearranging.emit_cat,
    "tt.map_elementwise": rearranging.emit_map,
    "tt.dot": products.emit_dot,
    "scf.for": control.emit_for,
    "scf.if": control.emit_if,
    "scf.while": control.emit_while,
    "tt.call": functions.emit_call,
    "tt.print": debugging.emit_print,
    "tt.assert": debugging.emit_assert,
    "llvm.intr.assume": Generator.nothing,
    "ttg.barrier": Generator.nothing,
    "gpu.barrier": Generator.nothing,
}
