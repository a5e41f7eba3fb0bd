"""Loads that wait for the store of what is computed from them: read in the store's own loop, where they lie.

That is right as long as the store writes nothing that a later turn still has to read. Where its place and theirs lie is
known only at run time: the runtime says whether they are apart, and otherwise copies what is read first.
"""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import products
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression
from vllm_triton.compile.triton_cpu.codegen.nest import Nest
from vllm_triton.compile.triton_cpu.codegen.types import STORAGE, shape_of
from vllm_triton.compile.triton_cpu.ir import Operation, Value

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator


def prepare(generator: "Generator", store: Operation) -> None:
    """Decides where each load is read from that waits for this store."""
    for value in generator.plan.waiting.get(store, ()):
        if not _in_place(generator, value, store):
            generator.buffers[value] = generator.materialise(value)


def _in_place(generator: "Generator", value: Value, store: Operation) -> bool:
    load = value.producer
    assert load is not None, "a load waits"
    nest = Nest(shape_of(value.type), generator.names)
    pointer, *rest = [generator.operand(operand, tuple(nest.indices), nest) for operand in load.operands]
    to = generator.operand(store.operands[0], tuple(nest.indices), nest)
    count = products.count(rest[0], value.type.size) if rest else str(value.type.size)
    if count is None or not (_is_row(pointer) and _is_row(to)):
        return False
    storage, name = STORAGE[value.type.element], generator.names.new("from")
    memory = f"{name}_memory"
    generator.reserve(f"alignas(64) {storage} {memory}[{value.type.size}]; const {storage}* {name};", value.type)
    nest.drop_lanes()
    places = f"{_first(pointer)}, {count}, {_first(to)}"
    nest.emit(f"{name} = tcpu::source<{value.type.size}>({memory}, {places});", 0)
    generator.lines += nest.lines()
    generator.sources[value] = name
    return True


def _is_row(pointer: Expression) -> bool:
    return pointer.is_row and pointer.start is not None and pointer.start.level == 0


def _first(pointer: Expression) -> str:
    assert pointer.start is not None, "a row has a start"
    return f"({pointer.base} + {pointer.start.text})"
