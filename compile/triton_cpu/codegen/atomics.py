"""tt.atomic_rmw and tt.atomic_cas: statements, whose results go to memory where somebody reads them."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import memory
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest
from vllm_triton.compile.triton_cpu.codegen.types import STORAGE
from vllm_triton.compile.triton_cpu.ir import Operation

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator

# TTIR's word -> the runtime's `Update`.
_UPDATES = {
    "add": "ADD",
    "fadd": "ADD",
    "and": "AND",
    "or": "OR",
    "xor": "XOR",
    "exch": "EXCHANGE",
    "min": "MIN",
    "max": "MAX",
    "umin": "UNSIGNED_MIN",
    "umax": "UNSIGNED_MAX",
}


def emit_atomic(generator: "Generator", operation: Operation) -> None:
    """Raises: UnsupportedOperationError for an update that Triton did not have."""
    pointer, *_ = operation.operands
    storage = STORAGE[pointer.type.pointee or "i8"]
    nest = Nest(operation.result.type.shape or (), generator.names)
    places = [generator.operand(value, tuple(nest.indices), nest) for value in operation.operands]
    if operation.name == "tt.atomic_cas":
        values, mask = places[1:], None
        scalar_call, lanes_call = "tcpu::atomic_exchange_if", f"tcpu::atomic_exchange_lanes_if<{storage}>"
    else:
        values, mask = places[1:2], places[2] if len(places) > 2 else None
        update = next((f"tcpu::Update::{_UPDATES[word]}" for word in operation.words if word in _UPDATES), None)
        if update is None:
            raise operation.unsupported(f"the update {', '.join(operation.words)}")
        scalar_call, lanes_call = f"tcpu::atomic_update<{update}>", f"tcpu::atomic_update_lanes<{update}, {storage}>"
    if operation.result.type.is_tensor:
        where = memory.access(places[0], pointer.type.pointee or "i8", mask, nest)
        addresses = as_vector(memory.to_address(places[0], pointer.type.pointee or "i8"))
        bits = f"tcpu::to_bits({where.bits})" if where.bits else f"{memory.ALL_LANES}u"
        text = f"{lanes_call}({', '.join([addresses, bits, *map(as_vector, values)])})"
        _emit_lanes(generator, operation, nest, text)
        return
    arguments = [memory.address(places[0], storage), *(value.text for value in values)]
    text = f"{scalar_call}({', '.join(arguments)})"
    _emit_scalar(generator, operation, nest, text, mask)


def _emit_lanes(generator: "Generator", operation: Operation, nest: Nest, text: str) -> None:
    if not operation.result.uses:
        nest.emit(f"{text};")
    else:
        buffer = generator.buffers[operation.result] = generator.new_buffer(operation.result.type)
        nest.emit(f"tcpu::store<{buffer.storage}>({buffer.name} + {nest.flat.text}, {text});")
    generator.lines += nest.lines()


def _emit_scalar(generator: "Generator", operation: Operation, nest: Nest, text: str, mask: Expression | None) -> None:
    target = generator.scalars[operation.result] = generator.declare(operation.result.type)
    if mask is not None:
        nest.emit(f"{target.text} = 0;")
        nest.emit(f"if ({mask.text})")
    nest.emit(f"{target.text} = {text};")
    generator.lines += nest.lines()
