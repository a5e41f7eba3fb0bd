"""tt.dot: operands in memory, the product by the runtime's kernels."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen.types import shape_of
from vllm_triton.compile.triton_cpu.ir import Operation, Value

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Buffer, Generator


def emit_dot(generator: "Generator", operation: Operation) -> None:
    """result = left @ right + addend, for two axes, or three with a batch in front."""
    left, right, addend = operation.operands
    *batch, rows, depth = shape_of(left.type)
    columns = shape_of(right.type)[-1]
    left_buffer, left_transposed = _operand(generator, operation, left)
    right_buffer, right_transposed = _operand(generator, operation, right)
    target = _accumulator(generator, operation, addend)
    number = generator.names.new("i")
    count = batch[0] if batch else 1
    flags = f"{str(left_transposed).lower()}, {str(right_transposed).lower()}"
    places = ", ".join(
        f"{buffer.name} + {number} * {size}"
        for buffer, size in (
            (target, rows * columns),
            (left_buffer, rows * depth),
            (right_buffer, depth * columns),
        )
    )
    generator.lines.append(
        f"for (int32_t {number} = 0; {number} < {count}; ++{number}) "
        f"tcpu::dot<{rows}, {columns}, {depth}, {flags}>({places});"
    )


def _operand(generator: "Generator", operation: Operation, value: Value) -> tuple["Buffer", bool]:
    """A buffer, and whether it holds the operand transposed: a transposed view of memory is not copied."""
    producer = value.producer
    if producer is not None and producer.name == "tt.trans" and value not in generator.buffers:
        order = producer.attributes["order"]
        if order[-2:] == [len(order) - 1, len(order) - 2]:
            return generator.in_memory(producer.operands[0], operation), True
    return generator.in_memory(value, operation), False


def _accumulator(generator: "Generator", operation: Operation, addend: Value) -> "Buffer":
    """The addend's own memory where nobody reads it again, not even this product in a loop's next turn; else a copy."""
    if addend in generator.buffers and len(addend.uses) == 1 and generator.plan.is_local(addend, operation):
        buffer = generator.buffers[addend]
    else:
        buffer = generator.materialise(addend)
    generator.buffers[operation.result] = buffer
    return buffer
