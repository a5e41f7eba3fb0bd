"""The generator: walks a kernel's operations and writes C++ for each.

Scalars become variables. Tensors are computed where they are read, 16 lanes at a time (`evaluate`), unless the plan
gives them memory (`materialise`). What is a statement of its own, a store, a reduction, a loop, opens a `Nest`.
"""

from dataclasses import dataclass

from vllm_triton.compile.triton_cpu.codegen import control, elementwise, expressions, memory, products, reductions
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector, lane_indices, uniform
from vllm_triton.compile.triton_cpu.codegen.nest import Names, Nest
from vllm_triton.compile.triton_cpu.codegen.plan import VIEWS, Plan
from vllm_triton.compile.triton_cpu.codegen.types import LANES, STORAGE, WIDTH, literal, scalar, shape_of
from vllm_triton.compile.triton_cpu.ir import Block, Function, Operation, Type, Value
from vllm_triton.compile.triton_cpu.parser import parse

# A program's buffers live on its thread's stack.
LARGEST_FRAME = 4 << 20
_PROGRAM = {"x": "pid_x", "y": "pid_y", "z": "pid_z"}
_NUM_PROGRAMS = {"x": "num_x", "y": "num_y", "z": "num_z"}
Indices = tuple[Expression, ...]


def generate(ttir: str) -> str:
    """C++ that exports `void <kernel>(const uint64_t* args, pid_x, pid_y, pid_z, num_x, num_y, num_z)`.

    args holds 8 bytes for each argument of the kernel: an address, a sign-extended integer, or a float's bits.

    Raises: UnsupportedOperationError, ParseError.
    """
    return Generator(parse(ttir).kernel).source()


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: row-major, contiguous, padded to whole chunks; `name` is a pointer variable."""

    name: str
    element: str
    shape: tuple[int, ...]

    @property
    def storage(self) -> str:
        return STORAGE[self.element]


class Generator:
    def __init__(self, function: Function):
        self.function = function
        self.names = Names()
        self.plan = Plan(function.body)
        self.scalars: dict[Value, Expression] = {}
        self.buffers: dict[Value, Buffer] = {}
        self.tables: dict[Value, tuple[str, bool]] = {}
        self.declarations: list[str] = []
        self.lines: list[str] = []
        self.frame = 0

    def source(self) -> str:
        for index, argument in enumerate(self.function.arguments):
            self._argument(index, argument)
        control.emit_blocks(self, self.function.body)
        arguments = "const uint64_t* args, " + ", ".join(
            f"int32_t {name}" for name in (*_PROGRAM.values(), *_NUM_PROGRAMS.values())
        )
        body = "\n".join([*self.declarations, *self.lines])
        return (
            '#include "kernel.h"\n\n'
            f'extern "C" void {self.function.name}({arguments}) {{\n'
            "(void)args, (void)pid_x, (void)pid_y, (void)pid_z, (void)num_x, (void)num_y, (void)num_z;\n"
            f"{body}\n}}\n"
        )

    def _argument(self, index: int, argument: Value) -> None:
        type_ = argument.type
        if type_.is_tensor:
            raise control.unsupported_function(self.function, f"the argument {argument.name} of type {type_}")
        name = self.names.new("a")
        if type_.is_pointer:
            self.declarations.append(f"auto* {name} = ({STORAGE[type_.pointee or 'i8']}*)args[{index}];")
        else:
            self.declarations.append(
                f"const {scalar(type_.element)} {name} = tcpu::argument<{scalar(type_.element)}>(args[{index}]);"
            )
        self.scalars[argument] = self._scalar(name, type_)

    @staticmethod
    def _scalar(name: str, type_: Type) -> Expression:
        return Expression("0", "ptr", 0, base=name) if type_.is_pointer else uniform(name, type_.element)

    # Declarations

    def declare(self, type_: Type) -> Expression:
        """A variable for a scalar of this type."""
        name = self.names.new("s")
        c_type = f"{STORAGE[type_.pointee or 'i8']}*" if type_.is_pointer else scalar(type_.element)
        self.declarations.append(f"{c_type} {name};")
        return self._scalar(name, type_)

    def assign(self, target: Expression, value: Expression, type_: Type) -> None:
        if type_.is_pointer:
            storage = STORAGE[type_.pointee or "i8"]
            self.lines.append(f"{target.base} = {memory.address(value, storage)};")
        else:
            self.lines.append(f"{target.text} = {value.text};")

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
            operands = [
                self.evaluate(operand, self._matching(operand, indices), nest) for operand in operation.operands
            ]
            if operation.name == "arith.select":
                operands[0] = nest.condition(operands[0])
            if operation.name == "arith.select" and value.type.is_pointer:
                pointee = value.type.pointee or "i8"
                operands[1:] = [memory.to_address(operand, pointee) for operand in operands[1:]]
            return elementwise.compute(operation, operands)
        raise operation.unsupported()

    @staticmethod
    def _matching(operand: Value, indices: Indices) -> Indices:
        return indices if operand.type.is_tensor else ()

    def read(self, buffer: Buffer, indices: Indices, nest: Nest) -> Expression:
        """From a buffer, whose padding may be read."""
        flat = memory.widen(nest.flat_index(list(indices), buffer.shape))
        pointer = Expression(flat.text, "ptr", flat.level, flat.kind, flat.step, buffer.name)
        loaded = memory.load(memory.everywhere(pointer, buffer.element), None)
        if buffer.element == "i1" and loaded.is_uniform:
            return Expression(f"({loaded.text} != 0)", "i1", loaded.level)
        return loaded

    def _view(self, operation: Operation, value: Value, indices: Indices, nest: Nest) -> Expression:
        name, shape = operation.name, value.type.shape or ()
        if name == "arith.constant":
            return uniform(literal(operation.attributes["value"], value.type.element), value.type.element)
        source = operation.operands[0] if operation.operands else value
        source_shape = source.type.shape or ()
        if name == "tt.make_range":
            start = operation.attributes["start"]
            return expressions.add(indices[0], uniform(f"int32_t({start})", "i32")) if start else indices[0]
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
            pointer = self.evaluate(source, self._matching(source, indices), nest)
            offset = self.evaluate(operation.operands[1], self._matching(operation.operands[1], indices), nest)
            return memory.advance(pointer, offset, source.type.pointee or "i8")
        raise operation.unsupported()

    @staticmethod
    def _choose(index: Expression, sides: list[Expression]) -> Expression:
        """The first side where the index is 0, the second where it is 1."""
        element = sides[0].element
        level = max(index.level, *(side.level for side in sides))
        if index.is_uniform and all(side.is_uniform for side in sides):
            return Expression(f"({index.text} == 0 ? {sides[0].text} : {sides[1].text})", element, level)
        first = f"tcpu::cmp_eq({as_vector(index)}, tcpu::splat<int32_t>(0))"
        return Expression(
            f"tcpu::select({first}, {as_vector(sides[0])}, {as_vector(sides[1])})", element, level, "vector"
        )

    def _load(self, operation: Operation, indices: Indices, nest: Nest) -> Expression:
        pointer, *rest = [
            self.evaluate(operand, self._matching(operand, indices), nest) for operand in operation.operands
        ]
        pointee = operation.operands[0].type.pointee or "i8"
        mask, other = [*rest, None, None][:2]
        return memory.load(memory.access(pointer, pointee, mask, nest), other)

    def materialise(self, value: Value, buffer: Buffer | None = None) -> Buffer:
        """Computes a tensor into memory now."""
        target = buffer or self.new_buffer(value.type)
        nest = Nest(target.shape, self.names)
        result, rounds = self._to_store(value, tuple(nest.indices), nest)
        if value.type.is_pointer:
            result = memory.to_address(result, value.type.pointee or "i8")
        place = f"{target.name} + {nest.flat.text}"
        nest.emit(f"tcpu::store<{target.storage}>({place}, {memory.stored(result, rounds)});")
        self.lines += nest.lines()
        return target

    def _to_store(self, value: Value, indices: Indices, nest: Nest) -> tuple[Expression, bool]:
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
                continue
            if operation.name == "arith.constant":
                self.scalars[result] = uniform(
                    literal(operation.attributes["value"], result.type.element), result.type.element
                )
                continue
            nest = Nest((), self.names)
            value = self._compute(result, (), nest)
            self.lines += nest.before[0]
            target = self.declare(result.type)
            self.assign(target, value, result.type)
            self.scalars[result] = target

    def _table(self, operation: Operation, result: Value) -> Buffer:
        """A constant whose elements differ."""
        buffer = self.new_buffer(result.type)
        for index, number in enumerate(operation.attributes["value"]):
            text = literal(number, result.type.element)
            self.lines.append(f"tcpu::store_scalar<{buffer.storage}>({buffer.name} + {index}, {text});")
        return buffer

    def program_id(self, operation: Operation) -> None:
        names = _PROGRAM if operation.name == "tt.get_program_id" else _NUM_PROGRAMS
        axis = next(word for word in operation.words if word in names)
        self.scalars[operation.result] = uniform(names[axis], "i32")

    def store(self, operation: Operation) -> None:
        pointer, value = operation.operands[:2]
        nest = Nest(value.type.shape or (), self.names)
        indices = tuple(nest.indices)
        stored, rounds = self._to_store(value, self._matching(value, indices), nest)
        place, *masks = [
            self.evaluate(operand, self._matching(operand, indices), nest)
            for operand in (pointer, *operation.operands[2:])
        ]
        where = memory.access(place, pointer.type.pointee or "i8", masks[0] if masks else None, nest)
        text, _ = memory.store(where, stored, rounds)
        nest.emit(text)
        self.lines += nest.lines()


_STATEMENTS = {
    "tt.get_program_id": Generator.program_id,
    "tt.get_num_programs": Generator.program_id,
    "tt.store": Generator.store,
    "tt.reduce": reductions.emit_reduce,
    "tt.scan": reductions.emit_scan,
    "tt.dot": products.emit_dot,
    "scf.for": control.emit_for,
    "scf.if": control.emit_if,
    "scf.while": control.emit_while,
}
