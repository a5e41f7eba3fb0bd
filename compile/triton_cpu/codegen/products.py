"""tt.dot: the product by the runtime's kernels, of operands that are read where they lie or that are put into a tile.

A right operand that is computed for the product alone goes straight into the panels that the product reads, which else
would be packed from the tile.

A loaded operand is read in place if each of its rows lies contiguous in memory: the runtime gets a table of rows. Where
the load is masked the operand is zero, and so that a zero meets every infinity of the other side, a row without
elements is a row of zeros, and only what is zero on both sides is left out.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import elementwise, expressions, memory
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest, lane_axis
from vllm_triton.compile.triton_cpu.codegen.types import STORAGE, WIDTH, shape_of
from vllm_triton.compile.triton_cpu.ir import Operation, Value

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Buffer, Generator

# Of the columns that a panel can have on any machine, the most.
WIDEST_PANEL = 32
_PANEL_ELEMENTS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class _Operand:
    """text: what the runtime gets.

    transposed: whether its axes lie exchanged in memory.
    """

    text: str
    transposed: bool


def emit_dot(generator: "Generator", operation: Operation) -> None:
    """result = left @ right + addend, for two axes, or three with a batch in front."""
    left, right, addend = operation.operands
    *batch, rows, depth = shape_of(left.type)
    columns = shape_of(right.type)[-1]
    number = generator.names.new("i")
    left_operand = _operand(generator, operation, left, number, may_be_transposed=False)
    right_operand = _panels(generator, operation)
    if right_operand is None:
        right_operand = _operand(generator, operation, right, number, may_be_transposed=True)
    target = _accumulator(generator, operation, addend)
    sizes = f"<{rows}, {columns}, {depth}, {_bool(left_operand.transposed)}, {_bool(right_operand.transposed)}>"
    target_text = f"{target.name} + {number} * {rows * columns}"
    call = f"tcpu::dot{sizes}({target_text}, {left_operand.text}, {right_operand.text});"
    generator.lines.append(f"for (int32_t {number} = 0; {number} < {batch[0] if batch else 1}; ++{number}) {call}")


def _bool(value: bool) -> str:
    return str(value).lower()


def emit_load(generator: "Generator", load: Operation) -> None:
    """A table of the rows of an operand, so that they are fetched while the program goes on to its product."""
    shape = shape_of(load.result.type)
    if load.result in generator.plan.buffered or len(shape) != 2 or not _is_operand(load.result):
        return
    for swapped in (False, True):
        name = _table(generator, load, swapped)
        if name is not None:
            generator.tables[load.result] = (name, swapped)
            return


def _is_operand(value: Value) -> bool:
    """Whether a product reads it, as it is or transposed."""
    return all(use.name == "tt.dot" or (use.name == "tt.trans" and _is_operand(use.result)) for use in value.uses)


def _operand(
    generator: "Generator", operation: Operation, value: Value, number: str, may_be_transposed: bool
) -> _Operand:
    """number: C++ variable that counts the batch."""
    source, transposed = value, False
    while source not in generator.buffers and source.producer is not None and source.producer.name == "tt.trans":
        order = source.producer.attributes["order"]
        if order[-2:] != [len(order) - 1, len(order) - 2]:
            break
        source, transposed = source.producer.operands[0], not transposed
    if source in generator.tables:
        name, swapped = generator.tables[source]
        if transposed == swapped or may_be_transposed:
            return _Operand(name, transposed != swapped)
    buffer = generator.in_memory(source, operation)
    *_, rows, columns = buffer.shape
    first = f"{buffer.name} + {number} * {rows * columns}"
    return _Operand(f"tcpu::plain<{buffer.storage}>{{{first}, {columns}}}", transposed)


def _panels(generator: "Generator", operation: Operation) -> _Operand | None:
    """Computes the right operand into panels; None where it lies in memory, or its rows do not come in pairs."""
    left, right, _ = operation.operands
    depth, columns = shape_of(right.type)[-2:]
    elements = (left.type.element, right.type.element)
    value = right
    while value not in generator.buffers and value.producer is not None and value.producer.name == "tt.reshape":
        value = value.producer.operands[0]
    shape = shape_of(value.type)
    if value in generator.buffers or value.producer is None or value.producer.name not in elementwise.NAMES:
        return None
    if len(right.uses) != 1 or len(shape_of(right.type)) != 2 or operation.result.type.element != "f32":
        return None
    if not set(elements) <= set(_PANEL_ELEMENTS) or columns % WIDEST_PANEL or shape[-1] != columns or depth < 2:
        return None
    axis = max(axis for axis, extent in enumerate(shape[:-1]) if extent > 1)
    nest = Nest((*shape[:axis], shape[axis] // 2, *shape[axis + 1 :]), generator.names, unroll=len(shape) > 2)
    first = _in_pair(nest, axis, 0)
    row = nest.flat_index(list(first[:-1]), shape[:-1])
    stored = [_to_put(generator, value, indices, nest) for indices in (first, _in_pair(nest, axis, 1))]
    name = generator.names.new("p")
    kinds = f"{STORAGE[elements[0]]}, {STORAGE[elements[1]]}, {depth}, {columns}"
    generator.reserve(f"tcpu::panels<{kinds}> {name};", right.type, right.type.size * (4 - WIDTH[elements[1]]))
    nest.emit(f"{name}.put({row.text}, {nest.indices[-1].text}, {', '.join(stored)});")
    generator.lines += nest.lines()
    return _Operand(name, False)


def _in_pair(nest: Nest, axis: int, side: int) -> tuple[Expression, ...]:
    """The indices of one of two rows, where the nest counts pairs along an axis."""
    index = nest.indices[axis]
    if nest.shape[axis] == 1:
        moved = expressions.constant(str(side), "i32", side)
    else:
        moved = expressions.multiply(index, expressions.constant("2", "i32", 2))
        moved = expressions.add(moved, expressions.constant(str(side), "i32", side)) if side else moved
    return (*nest.indices[:axis], moved, *nest.indices[axis + 1 :])


def _to_put(generator: "Generator", value: Value, indices: tuple[Expression, ...], nest: Nest) -> str:
    """A row's lanes as panels take them: the bits of a bf16 that come from an integer stay as they are."""
    bits = value.producer
    if bits is not None and bits.name in ("tt.bitcast", "arith.bitcast") and value.type.element == "bf16":
        narrowed = bits.operands[0].producer
        if narrowed is not None and narrowed.name == "arith.trunci" and narrowed.operands[0].type.element == "i32":
            lanes = as_vector(generator.evaluate(narrowed.operands[0], indices, nest))
            return f"tcpu::words{{(tcpu::vec<uint32_t>)({lanes})}}"
    return memory.stored(*generator.to_store(value, indices, nest))


def _table(generator: "Generator", load: Operation, swapped: bool) -> str | None:
    """Fills a table of the loaded tile's rows, or of its columns where axes are swapped; None if they lie scattered."""
    shape = shape_of(load.result.type)
    rows, columns = shape[::-1] if swapped else shape
    if lane_axis((rows, columns)) != 1:
        return None
    nest = Nest((rows, columns), generator.names)
    indices = tuple(nest.indices[::-1] if swapped else nest.indices)
    pointer, *rest = (generator.evaluate(operand, indices, nest) for operand in load.operands)
    if not pointer.is_row or pointer.start is None:
        return None
    elements = count(rest[0], columns) if rest else str(columns)
    if elements is None or (len(rest) > 1 and not load.operands[2].is_zero):
        return None
    name = generator.names.new("o")
    storage = STORAGE[load.result.type.element]
    generator.reserve(f"tcpu::row_table<{storage}, {rows}, {columns}> {name};", load.result.type, rows * 16)
    nest.drop_lanes()
    nest.emit(f"{name}.set({nest.indices[0].text}, {pointer.base} + {pointer.start.text}, {elements});")
    generator.lines += [*nest.lines(), f"{name}.fetch();"]
    return name


def count(mask: Expression, columns: int) -> str | None:
    """C++ number of elements of a row that a mask lets through, from the first on."""
    if mask.is_uniform:
        return f"(({mask.text}) ? {columns} : 0)"
    return mask.start.text if mask.kind == "below" and mask.start is not None else None


def _accumulator(generator: "Generator", operation: Operation, addend: Value) -> "Buffer":
    """The addend's own memory where nobody reads it again, not even this product in a loop's next turn; else a copy."""
    if addend in generator.buffers and len(addend.uses) == 1 and generator.plan.is_local(addend, operation):
        buffer = generator.buffers[addend]
    else:
        buffer = generator.materialise(addend)
    generator.buffers[operation.result] = buffer
    return buffer
