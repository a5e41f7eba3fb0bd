"""Reductions with any combining region and several operands."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest, lane_axis
from vllm_triton.compile.triton_cpu.codegen.types import LANES, scalar, shape_of, strides, vector
from vllm_triton.compile.triton_cpu.ir import Block, Operation

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Buffer, Generator

# Chunks along the lanes that are summed apart: an addition would wait for the one before.
PARTS = 4


def emit_reduce(generator: "Generator", operation: Operation) -> None:
    """One result per operand, without the axis."""
    shape, axis = shape_of(operation.operands[0].type), operation.attributes["axis"]
    targets = []
    for result in operation.results:
        if result.type.is_tensor:
            generator.buffers[result] = generator.new_buffer(result.type)
            targets.append(generator.buffers[result].name)
        else:
            generator.scalars[result] = generator.declare(result.type)
            targets.append(f"&{generator.scalars[result].text}")
    if lane_axis(shape) == axis:
        _reduce_lanes(generator, operation, shape, axis, targets)
    else:
        _reduce_elements(generator, operation, shape, axis, targets)


def combine(
    generator: "Generator", nest: Nest, block: Block, left: list[str], right: list[str], kind: str
) -> list[Expression]:
    """The combining region at the innermost depth of a nest, for lanes or for scalars."""
    outside = nest.memo
    nest.memo = dict(outside)
    for argument, text in zip(block.arguments, [*left, *right], strict=True):
        nest.memo[argument, ()] = Expression(text, argument.type.element, nest.depth, kind)  # type: ignore[arg-type]
    found = [generator.evaluate(operand, (), nest) for operand in block.terminator.operands]
    nest.memo = outside  # the region's values are others at its next use
    return found


def _reduce_lanes(
    generator: "Generator", operation: Operation, shape: tuple[int, ...], axis: int, targets: list[str]
) -> None:
    """Along the lanes: 16 partial results, combined pairwise at the end."""
    others = [number for number in range(len(shape)) if number != axis]
    parts = PARTS if len(operation.operands) == 1 else 1
    nest = Nest(shape, generator.names, order=[*others, axis], parts=parts)
    outer, partial = _accumulate(generator, operation, nest, axis, steps=shape[axis] // LANES)
    _finish_lanes(generator, operation, nest, outer, partial, targets, axis)


def _accumulate(
    generator: "Generator", operation: Operation, nest: Nest, axis: int, steps: int
) -> tuple[int, list[str]]:
    """Combines the chunks along `axis`, the innermost loop of a nest, of so many steps.

    Returns: the level outside of that loop, and the vectors that hold the results there.
    """
    outer = nest.depth - (steps > 1) - (nest.part is not None)
    results = [generator.names.new("r") for _ in operation.operands]
    current = [f"{name}_x" for name in results]
    declared, partial, first_turn = results, results, f"{nest.indices[axis].text} == 0"
    if nest.part is not None:
        declared, partial = ([f"{name}_p[{index}]" for name in results] for index in (PARTS, nest.part))
        first_turn = f"{nest.indices[axis].text} < {LANES * PARTS}"
    values = [as_vector(generator.evaluate(operand, tuple(nest.indices), nest)) for operand in operation.operands]
    for name, new, operand, value in zip(declared, current, operation.operands, values, strict=True):
        type_name = vector(operand.type.element)
        nest.before[outer].append(f"{type_name} {name}{{}};")
        nest.emit(f"const {type_name} {new} = {value};")
    first = " ".join(f"{name} = {new};" for name, new in zip(partial, current, strict=True))
    if steps == 1:
        nest.emit(first)
        return outer, partial
    nest.emit(f"if ({first_turn}) {{ {first} }} else {{")
    combined = combine(generator, nest, operation.regions[0].block, partial, current, "vector")
    set_together(nest, partial, [as_vector(value) for value in combined])
    nest.emit("}")
    if nest.part is not None:
        _join_parts(generator, operation, nest, outer, results)
    return outer, results


def _join_parts(generator: "Generator", operation: Operation, nest: Nest, outer: int, results: list[str]) -> None:
    """Pairwise, each result into a variable of its name."""
    for count in (PARTS // 2, 1):
        for number in range(count):
            finish = Nest((), generator.names)
            left, right = ([f"{name}_p[{place}]" for name in results] for place in (number, number + count))
            combined = combine(generator, finish, operation.regions[0].block, left, right, "vector")
            set_together(finish, left, [as_vector(value) for value in combined])
            for line in finish.lines():
                nest.emit_after(line, outer)
    for name, operand in zip(results, operation.operands, strict=True):
        nest.emit_after(f"{vector(operand.type.element)} {name} = {name}_p[0];", outer)


def _finish_lanes(
    generator: "Generator",
    operation: Operation,
    nest: Nest,
    outer: int,
    partial: list[str],
    targets: list[str],
    axis: int,
) -> None:
    """From 16 lanes to one, and into the result."""
    for distance in (8, 4, 2, 1):
        finish = Nest((), generator.names)
        moved = [f"tcpu::shift_down<{distance}>({name})" for name in partial]
        combined = combine(generator, finish, operation.regions[0].block, partial, moved, "vector")
        set_together(finish, partial, [as_vector(value) for value in combined])
        for line in finish.lines():
            nest.emit_after(line, outer)
    index = nest.flat_index(
        [ix for number, ix in enumerate(nest.indices) if number != axis], _without(nest.shape, axis)
    )
    for target, name in zip(targets, partial, strict=True):
        place = f"{target} + {index.text}" if operation.results[0].type.is_tensor else target
        nest.emit_after(f"tcpu::put({place}, {name}[0]);", outer)
    generator.lines += nest.lines()


def set_together(nest: Nest, places: list[str], texts: list[str]) -> None:
    fresh = [nest.names.new("c") for _ in places]
    for new, text in zip(fresh, texts, strict=True):
        nest.emit(f"const auto {new} = {text};")
    for place, new in zip(places, fresh, strict=True):
        nest.emit(f"{place} = {new};")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def scalar_walk(
    generator: "Generator", operation: Operation, shape: tuple[int, ...], axis: int
) -> tuple[list["Buffer"], str, str, list[str], list[str]]:
    """Operands in memory, and a row of loops over all elements that share no axis but `axis`."""
    buffers = [generator.in_memory(operand, operation) for operand in operation.operands]
    by_axis = strides(shape)
    opening, offset, result_offset = [], ["0"], ["0"]
    result_strides = iter(strides(_without(shape, axis)))
    for number, extent in enumerate(shape):
        if number == axis:
            continue
        variable = generator.names.new("i")
        opening.append(f"for (int32_t {variable} = 0; {variable} < {extent}; ++{variable}) {{")
        offset.append(f"{variable} * {by_axis[number]}")
        result_offset.append(f"{variable} * {next(result_strides)}")
    return buffers, " + ".join(offset), " + ".join(result_offset), opening, ["}"] * len(opening)


def _reduce_elements(
    generator: "Generator", operation: Operation, shape: tuple[int, ...], axis: int, targets: list[str]
) -> None:
    """Along any other axis: across it, chunk by chunk, where lanes lie; else element by element."""
    lane = lane_axis(shape)
    if lane is not None and operation.results[0].type.is_tensor:
        _reduce_across(generator, operation, shape, axis)
        return
    buffers, offset, result_offset, opening, closing = scalar_walk(generator, operation, shape, axis)
    stride = strides(shape)[axis]
    elements = [operand.type.element for operand in operation.operands]
    partial = [generator.names.new("r") for _ in elements]
    step = generator.names.new("i")
    lines = list(opening)
    for name, element, buffer in zip(partial, elements, buffers, strict=True):
        lines.append(f"{scalar(element)} {name} = {buffer.item(offset)};")
    lines.append(f"for (int32_t {step} = 1; {step} < {shape[axis]}; ++{step}) {{")
    nest = Nest((), generator.names)
    right = [buffer.item(f"{offset} + {step} * {stride}") for buffer in buffers]
    combined = combine(generator, nest, operation.regions[0].block, partial, right, "uniform")
    set_together(nest, partial, [value.text for value in combined])
    lines += [*nest.lines(), "}"]
    for target, name in zip(targets, partial, strict=True):
        place = f"{target} + {result_offset}" if operation.results[0].type.is_tensor else target
        lines.append(f"tcpu::put({place}, {name});")
    generator.lines += [*lines, *closing]


def _reduce_across(generator: "Generator", operation: Operation, shape: tuple[int, ...], axis: int) -> None:
    """Along an axis beside the lanes': 16 results at a time."""
    lane = lane_axis(shape)
    assert lane is not None, "the caller found lanes"
    others = [number for number in range(len(shape)) if number not in (axis, lane)]
    nest = Nest(shape, generator.names, order=[*others, lane, axis], unroll=True)
    outer, partial = _accumulate(generator, operation, nest, axis, steps=shape[axis])
    index = nest.flat_index([ix for number, ix in enumerate(nest.indices) if number != axis], _without(shape, axis))
    for result, name in zip(operation.results, partial, strict=True):
        buffer = generator.buffers[result]
        nest.emit_after(f"tcpu::store<{buffer.storage}>({buffer.name} + {index.text}, {name});", outer)
    generator.lines += nest.lines()
