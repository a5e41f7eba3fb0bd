"""Control flow: loops, branches, blocks. Values that move between blocks are moved at once, as if in parallel."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import elementwise
from vllm_triton.compile.triton_cpu.codegen.expressions import uniform
from vllm_triton.compile.triton_cpu.codegen.types import scalar
from vllm_triton.compile.triton_cpu.ir import Block, Function, Operation, Region, UnsupportedOperationError, Value

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator


def unsupported_function(function: Function, what: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(f"kernel {function.name}: the CPU backend does not cover {what}")


def receive(generator: "Generator", values: list[Value]) -> None:
    """Variables and buffers for the arguments of a block or the results of an operation."""
    for value in values:
        if value.type.is_tensor:
            generator.buffers[value] = generator.new_buffer(value.type)
        else:
            generator.scalars[value] = generator.declare(value.type)


def _move(generator: "Generator", sources: list[Value], targets: list[Value], ending: Block | None = None) -> None:
    """targets := sources, where sources may read targets. ending: a block whose values nobody reads afterwards."""
    pending: list[str] = []
    kept = [generator.buffers[target] for target in targets if target.type.is_tensor]
    for source, target in zip(sources, targets, strict=True):
        if target.type.is_tensor:
            given = sources.count(source) == 1 and generator.buffers.get(source) not in (None, *kept)
            given = given and ending is not None and source.producer in ending.operations
            pending += _move_tensor(generator, source, target, given)
            continue
        value, type_ = generator.scalar(source), target.type
        copy = generator.declare(type_)
        generator.assign(copy, value, type_)
        start = len(generator.lines)
        generator.assign(generator.scalars[target], copy, type_)
        pending += generator.lines[start:]
        del generator.lines[start:]
    generator.lines += pending


def _move_tensor(generator: "Generator", source: Value, target: Value, given: bool) -> list[str]:
    """Computes the new value beside the old one; returns what puts it in its place. given: its memory may be taken."""
    buffer = generator.buffers[target]
    if generator.buffers.get(source) == buffer:  # accumulated in place
        return []
    if source not in generator.buffers and _is_update(source, target):
        generator.materialise(source, buffer)
        return []
    if given:
        return [f"std::swap({buffer.name}, {generator.buffers[source].name});"]
    fresh = generator.new_buffer(target.type)
    generator.materialise(source, fresh)
    return [f"std::swap({buffer.name}, {fresh.name});"]


def _is_update(source: Value, target: Value) -> bool:
    """Whether each element of the new value needs only the same element of the old one, which nobody else reads."""
    value = target
    while value is not source:
        if len(value.uses) != 1:
            return False
        reader = value.uses[0]
        if reader.name not in elementwise.NAMES or reader.result.type.shape != target.type.shape:
            return False
        if len(set(map(id, reader.operands))) != len(reader.operands):
            return False
        value = reader.result
    return len(source.uses) == 1


def emit_for(generator: "Generator", operation: Operation) -> None:
    low, high, step, *initial = operation.operands
    index, *carried = operation.regions[0].block.arguments
    receive(generator, carried)
    _initialise(generator, initial, carried)
    variable = generator.names.new("n")
    multiples = [generator.scalars[value].multiple for value in (low, step)]
    generator.scalars[index] = uniform(
        variable, index.type.element, multiple=math.gcd(*multiples) if all(multiples) else 0
    )
    low_text, high_text, step_text = (generator.scalar(value).text for value in (low, high, step))
    c_type = scalar(index.type.element)
    generator.lines.append(
        f"for ({c_type} {variable} = {low_text}; {variable} < {high_text}; {variable} += {step_text}) {{"
    )
    block = operation.regions[0].block
    generator.block(block)
    _move(generator, block.terminator.operands, carried, block)
    generator.lines.append("}")
    _alias(generator, operation.results, carried)


def _initialise(generator: "Generator", sources: list[Value], targets: list[Value]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if target.type.is_tensor:
            generator.materialise(source, generator.buffers[target])
        else:
            generator.assign(generator.scalars[target], generator.scalar(source), target.type)


def _alias(generator: "Generator", results: list[Value], carried: list[Value]) -> None:
    """After a loop its results are what its arguments hold."""
    for result, argument in zip(results, carried, strict=True):
        if result.type.is_tensor:
            generator.buffers[result] = generator.buffers[argument]
        else:
            generator.scalars[result] = generator.scalars[argument]


def emit_if(generator: "Generator", operation: Operation) -> None:
    receive(generator, operation.results)
    generator.lines.append(f"if ({generator.scalar(operation.operands[0]).text}) {{")
    for number, region in enumerate(operation.regions):
        if number:
            generator.lines.append("} else {")
        generator.block(region.block)
        _initialise(generator, region.block.terminator.operands, operation.results)
    generator.lines.append("}")


def emit_while(generator: "Generator", operation: Operation) -> None:
    before, after = (region.block for region in operation.regions)
    receive(generator, before.arguments)
    receive(generator, after.arguments)
    _initialise(generator, operation.operands, before.arguments)
    generator.lines.append("for (;;) {")
    generator.block(before)
    condition, *forwarded = before.terminator.operands
    _move(generator, forwarded, after.arguments)
    generator.lines.append(f"if (!({generator.scalar(condition).text})) break;")
    generator.block(after)
    _move(generator, after.terminator.operands, before.arguments, after)
    generator.lines.append("}")
    _alias(generator, operation.results, after.arguments)


def emit_blocks(generator: "Generator", region: Region, finish: Callable[[Operation], None]) -> None:
    """Blocks that branch to one another, from the first one on.

    finish: writes what ends the region, given the terminator of a block that leaves it.
    """
    labels = {block.label: generator.names.new("block_") for block in region.blocks}
    by_label = {block.label: block for block in region.blocks}
    for block in region.blocks[1:]:
        receive(generator, block.arguments)
    for number, block in enumerate(region.blocks):
        if number:
            generator.lines.append(f"{labels[block.label]}:;")
        generator.lines.append("{")
        generator.block(block)
        terminator = block.terminator
        jumps = []
        for label, values in terminator.successors:
            jumps.append((labels[label], values, by_label[label].arguments))
        if terminator.name in ("tt.return", "tt.map_elementwise.return"):
            finish(terminator)
        elif terminator.name == "cf.br":
            _jump(generator, *jumps[0])
        elif terminator.name == "cf.cond_br":
            generator.lines.append(f"if ({generator.scalar(terminator.operands[0]).text}) {{")
            _jump(generator, *jumps[0])
            generator.lines.append("} else {")
            _jump(generator, *jumps[1])
            generator.lines.append("}")
        else:
            raise terminator.unsupported()
        generator.lines.append("}")


def _jump(generator: "Generator", label: str, sources: list[Value], targets: list[Value]) -> None:
    _move(generator, sources, targets)
    generator.lines.append(f"goto {label};")
