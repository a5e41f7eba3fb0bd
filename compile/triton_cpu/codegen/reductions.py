"""Reductions with any combining region and several operands."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen.combining import combine, fold, folded, neutral, set_together
from vllm_triton.compile.triton_cpu.codegen.expressions import as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest, lane_axis
from vllm_triton.compile.triton_cpu.codegen.types import LANES, register, scalar, shape_of, strides, vector
from vllm_triton.compile.triton_cpu.ir import Operation

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


def _reduce_lanes(
    generator: "Generator", operation: Operation, shape: tuple[int, ...], axis: int, targets: list[str]
) -> None:
    """Along the lanes: 16 partial results, combined pairwise at the end."""
    others = [number for number in range(len(shape)) if number != axis]
    parts = PARTS if len(operation.operands) == 1 else 1
    nest = Nest(shape, generator.names, order=[*others, axis], parts=parts)
    outer, held = _accumulate(generator, operation, nest, axis, steps=shape[axis] // LANES)
    _finish_lanes(generator, operation, nest, outer, held, targets, axis)


def _accumulate(
    generator: "Generator", operation: Operation, nest: Nest, axis: int, steps: int
) -> tuple[int, list[list[str]]]:
    """Combines the chunks along `axis`, the innermost loop of a nest, of so many steps.

    Returns: the level outside of that loop, and the vectors that hold the results there, one or several per operand.
    """
    outer = nest.depth - (steps > 1) - (nest.part is not None)
    results = [generator.names.new("r") for _ in operation.operands]
    current = [f"{name}_x" for name in results]
    turn = nest.indices[axis].text
    if nest.part is None:
        partial, held, first_turn = results, [[name] for name in results], f"{turn} == 0"
    else:
        partial = [f"{name}_p[{nest.part}]" for name in results]
        held = [[f"{name}_p[{number}]" for number in range(PARTS)] for name in results]
        first_turn = f"{turn} < {LANES * PARTS}"
    values = [as_vector(generator.evaluate(operand, tuple(nest.indices), nest)) for operand in operation.operands]
    start = neutral(operation) if steps > 1 else None
    for name, new, operand, value in zip(results, current, operation.operands, values, strict=True):
        type_name = vector(operand.type.element)
        initial = [f"tcpu::splat<{register(operand.type.element)}>({start})"] if start else []
        size, initial = ("", initial) if nest.part is None else (f"_p[{PARTS}]", initial * PARTS)
        nest.before[outer].append(f"{type_name} {name}{size}{{{', '.join(initial)}}};")
        nest.emit(f"const {type_name} {new} = {value};")
    first = " ".join(f"{name} = {new};" for name, new in zip(partial, current, strict=True))
    if steps == 1:
        nest.emit(first)
        return outer, held
    if start is None:
        nest.emit(f"if ({first_turn}) {{ {first} }} else {{")
    combined = combine(generator, nest, operation.regions[0].block, partial, current, "vector")
    set_together(nest, partial, [as_vector(value) for value in combined])
    if start is None:
        nest.emit("}")
    return outer, held


def _finish_lanes(
    generator: "Generator",
    operation: Operation,
    nest: Nest,
    outer: int,
    held: list[list[str]],
    targets: list[str],
    axis: int,
) -> None:
    """From 16 lanes to one, and into the result."""
    found = [f"{names[0]}[0]" for names in held]
    shared = folded(generator, operation, held[0])
    if shared is not None:
        found = [shared]
    else:
        for line in fold(generator, generator.names, operation.regions[0].block, held):
            nest.emit_after(line, outer)
    index = nest.flat_index(
        [ix for number, ix in enumerate(nest.indices) if number != axis], _without(nest.shape, axis)
    )
    for target, text in zip(targets, found, strict=True):
        place = f"{target} + {index.text}" if operation.results[0].type.is_tensor else target
        nest.emit_after(f"tcpu::put({place}, {text});", outer)
    generator.lines += nest.lines()


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
    outer, held = _accumulate(generator, operation, nest, axis, steps=shape[axis])
    index = nest.flat_index([ix for number, ix in enumerate(nest.indices) if number != axis], _without(shape, axis))
    for result, [name] in zip(operation.results, held, strict=True):
        buffer = generator.buffers[result]
        nest.emit_after(f"tcpu::store<{buffer.storage}>({buffer.name} + {index.text}, {name});", outer)
    generator.lines += nest.lines()
