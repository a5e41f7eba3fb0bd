"""tt.scan, with any combining region and several operands, from either end of an axis."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen.combining import combine, set_together
from vllm_triton.compile.triton_cpu.codegen.expressions import Expression, as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest, lane_axis
from vllm_triton.compile.triton_cpu.codegen.reductions import scalar_walk
from vllm_triton.compile.triton_cpu.codegen.types import LANES, STORAGE, scalar, shape_of, strides, vector
from vllm_triton.compile.triton_cpu.ir import Operation

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator


def emit_scan(generator: "Generator", operation: Operation) -> None:
    """One result per operand, of its shape."""
    shape, axis = shape_of(operation.operands[0].type), operation.attributes["axis"]
    buffers = [generator.new_buffer(result.type) for result in operation.results]
    lane = lane_axis(shape)
    if lane is None:
        _scan_elements(generator, operation, axis, [buffer.name for buffer in buffers])
    else:
        _scan_chunks(generator, operation, axis, [buffer.name for buffer in buffers])
    generator.buffers |= zip(operation.results, buffers, strict=True)


def _scan_chunks(generator: "Generator", operation: Operation, axis: int, targets: list[str]) -> None:
    """16 lanes at a time; where they lie along the axis, each chunk is scanned within and then joined to those before.

    The loop along the axis is the innermost. It begins at the end where the scan begins.
    """
    shape, is_reverse = shape_of(operation.operands[0].type), bool(operation.attributes.get("reverse"))
    lane = lane_axis(shape)
    assert lane is not None, "the caller found lanes"
    others = [number for number in range(len(shape)) if number not in (axis, lane)]
    nest = Nest(shape, generator.names, order=[*others, lane, axis] if lane != axis else [*others, axis])
    step = LANES if lane == axis else 1
    is_loop = shape[axis] > step
    outer = nest.depth - is_loop
    turn = nest.indices[axis]
    indices = list(nest.indices)
    if is_reverse and is_loop:
        indices[axis] = Expression(f"({shape[axis] - step} - {turn.text})", "i32", turn.level, turn.kind, turn.step)
    elements = [operand.type.element for operand in operation.operands]
    values = [as_vector(generator.evaluate(operand, tuple(indices), nest)) for operand in operation.operands]
    carried = [generator.names.new("r") for _ in elements]
    current = [f"{name}_x" for name in carried]
    for element, name, new, value in zip(elements, carried, current, values, strict=True):
        nest.before[outer].append(f"{vector(element)} {name}{{}};")
        nest.emit(f"{vector(element)} {new} = {value};")
    if lane == axis:
        _scan_within(generator, operation, nest, current, is_reverse)
    if is_loop:
        nest.emit(f"if ({turn.text} != 0) {{")
        combined = combine(generator, nest, operation.regions[0].block, carried, current, "vector")
        set_together(nest, current, [as_vector(value) for value in combined])
        nest.emit("}")
        last = 0 if is_reverse else LANES - 1
        for name, new in zip(carried, current, strict=True):
            nest.emit(f"{name} = {f'tcpu::splat({new}[{last}])' if lane == axis else new};")
    flat = nest.flat_index(indices, shape)
    for result, target, new in zip(operation.results, targets, current, strict=True):
        nest.emit(f"tcpu::store<{STORAGE[result.type.element]}>({target} + {flat.text}, {new});")
    generator.lines += nest.lines()


def _scan_within(
    generator: "Generator", operation: Operation, nest: Nest, current: list[str], is_reverse: bool
) -> None:
    """Lanes 1, 2, 4 and 8 apart: after each step a lane holds twice as many elements."""
    for distance in (1, 2, 4, 8):
        before = [nest.names.new("c") for _ in current]
        for name, new in zip(before, current, strict=True):
            nest.emit(f"const auto {name} = tcpu::shift_lanes<{-distance if is_reverse else distance}>({new});")
        combined = combine(generator, nest, operation.regions[0].block, before, current, "vector")
        alone = f"tcpu::lanes_below({LANES - distance if is_reverse else distance})"
        chosen = []
        for new, value in zip(current, combined, strict=True):
            pair = (as_vector(value), new) if is_reverse else (new, as_vector(value))
            chosen.append(f"tcpu::select({alone}, {', '.join(pair)})")
        set_together(nest, current, chosen)


def _scan_elements(generator: "Generator", operation: Operation, axis: int, targets: list[str]) -> None:
    """One by one, for tiles without whole chunks of lanes."""
    shape = shape_of(operation.operands[0].type)
    sources, offset, _, opening, closing = scalar_walk(generator, operation, shape, axis)
    stride, extent = strides(shape)[axis], shape[axis]
    step = generator.names.new("i")
    at = f"{extent - 1} - {step}" if operation.attributes.get("reverse") else step
    place = f"{offset} + ({at}) * {stride}"
    elements = [operand.type.element for operand in operation.operands]
    partial = [generator.names.new("r") for _ in elements]
    lines = [*opening, *(f"{scalar(element)} {name}{{}};" for name, element in zip(partial, elements, strict=True))]
    lines.append(f"for (int32_t {step} = 0; {step} < {extent}; ++{step}) {{")
    current = [source.item(place) for source in sources]
    nest = Nest((), generator.names)
    combined = combine(generator, nest, operation.regions[0].block, partial, current, "uniform")
    set_together(nest, partial, [value.text for value in combined])
    firsts = " ".join(f"{name} = {text};" for name, text in zip(partial, current, strict=True))
    lines += [f"if ({step} == 0) {{ {firsts} }} else", *nest.lines()]
    for target, name in zip(targets, partial, strict=True):
        lines.append(f"tcpu::put({target} + {place}, {name});")
    generator.lines += [*lines, "}", *closing]
