"""What moves elements by their values or joins tiles: gather, histogram, cat; and a function over all elements."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import control, memory
from vllm_triton.compile.triton_cpu.codegen.expressions import as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest
from vllm_triton.compile.triton_cpu.codegen.types import shape_of
from vllm_triton.compile.triton_cpu.ir import Operation

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator


def emit_gather(generator: "Generator", operation: Operation) -> None:
    """result[..., i, ...] = source[..., index[..., i, ...], ...] along one axis."""
    source, index = operation.operands
    axis = operation.attributes["axis"]
    buffer = generator.in_memory(source, operation)
    result = generator.new_buffer(operation.result.type)
    nest = Nest(result.shape, generator.names)
    indices = list(nest.indices)
    indices[axis] = memory.as_integer(generator.evaluate(index, tuple(nest.indices), nest), "i32")
    value = generator.read(buffer, tuple(indices), nest)
    nest.emit(f"tcpu::store<{result.storage}>({result.name} + {nest.flat.text}, {as_vector(value)});")
    generator.lines += nest.lines()
    generator.buffers[operation.result] = result


def emit_histogram(generator: "Generator", operation: Operation) -> None:
    """Counts of 0, 1, ...; elements outside of the bins or of the mask count nowhere."""
    source, *masks = (generator.in_memory(operand, operation) for operand in operation.operands)
    result = generator.buffers[operation.result] = generator.new_buffer(operation.result.type)
    [bins], [size] = result.shape, source.shape
    index, value = generator.names.new("i"), generator.names.new("v")
    condition = f"{value} >= 0 && {value} < {bins}" + "".join(f" && {mask.name}[{index}]" for mask in masks)
    generator.lines += [
        f"std::fill_n({result.name}, {bins}, 0);",
        f"for (int32_t {index} = 0; {index} < {size}; ++{index}) {{",
        f"const auto {value} = {source.name}[{index}];",
        f"if ({condition}) ++{result.name}[{value}];",
        "}",
    ]


def emit_cat(generator: "Generator", operation: Operation) -> None:
    """The elements of the first operand, then those of the second."""
    result = generator.new_buffer(operation.result.type)
    start = 0
    for operand in operation.operands:
        nest = Nest(shape_of(operand.type), generator.names)
        value = as_vector(generator.evaluate(operand, tuple(nest.indices), nest))
        place = f"{result.name} + {start} + {nest.flat.text}"
        if nest.valid is None:
            nest.emit(f"tcpu::store<{result.storage}>({place}, {value});")
        else:
            nest.emit(f"tcpu::store_masked<{result.storage}>({place}, {nest.existing}, {value});")
        generator.lines += nest.lines()
        start += operand.type.size
    generator.buffers[operation.result] = result


def emit_map(generator: "Generator", operation: Operation) -> None:
    """tt.map_elementwise: its region has branches, so it takes `pack` elements of each operand at a time."""
    pack = operation.attributes["pack"]
    sources = [generator.in_memory(operand, operation) for operand in operation.operands]
    results = [generator.new_buffer(result.type) for result in operation.results]
    generator.buffers |= zip(operation.results, results, strict=True)
    region, size = operation.regions[0], operation.results[0].type.size
    index, end = generator.names.new("i"), generator.names.new("end_")
    control.receive(generator, region.blocks[0].arguments)
    generator.lines.append(f"for (int32_t {index} = 0; {index} < {size}; {index} += {pack}) {{")
    arguments = iter(region.blocks[0].arguments)
    for source in sources:
        for offset in range(pack):
            target = generator.scalars[next(arguments)]
            generator.lines.append(f"{target.text} = {source.item(f'{index} + {offset}')};")

    def finish(terminator: Operation) -> None:
        values = iter(terminator.operands)
        for result in results:
            for offset in range(pack):
                value = generator.scalar(next(values))
                generator.lines.append(f"tcpu::put({result.name} + {index} + {offset}, {value.text});")
        generator.lines.append(f"goto {end};")

    control.emit_blocks(generator, region, finish)
    generator.lines += [f"{end}:;", "}"]
