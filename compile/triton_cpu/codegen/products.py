"""tt.dot: the product by the runtime's kernels, of operands that are read where they lie or that are put into a tile.

A loaded operand is read in place if each of its rows lies contiguous in memory: the runtime gets a table of rows. Where
the load is masked the operand is zero, and so that a zero meets every infinity of the other side, a row without
elements is a row of zeros, and only what is zero on both sides is left out.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen.expressions import Expression
from vllm_triton.compile.triton_cpu.codegen.nest import Nest, lane_axis
from vllm_triton.compile.triton_cpu.codegen.types import STORAGE, shape_of
from vllm_triton.compile.triton_cpu.ir import Operation, Value

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Buffer, Generator


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
