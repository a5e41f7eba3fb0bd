"""Bounds checks: before each access to memory a nest of its own that ends the program where one lies outside.

Apart from the access, so that none of the ways in which it may be done needs to know of the check.
"""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import memory
from vllm_triton.compile.triton_cpu.codegen.debugging import PROGRAM, c_string, failure, index_text
from vllm_triton.compile.triton_cpu.codegen.expressions import as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest
from vllm_triton.compile.triton_cpu.codegen.types import LANES, WIDTH, shape_of
from vllm_triton.compile.triton_cpu.ir import Operation

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator

# Operation -> how a message calls it, and which operand is its mask.
_ACCESSES = {
    "tt.load": ("load of", 1),
    "tt.store": ("store to", 2),
    "tt.atomic_rmw": ("atomic update of", 2),
    "tt.atomic_cas": ("atomic exchange of", 3),
}


def emit_check(generator: "Generator", operation: Operation) -> None:
    """Nothing for operations that access no memory of a tensor's."""
    if operation.name in _ACCESSES:
        _check_access(generator, operation)
    elif operation.name == "tt.gather":
        _check_gather(generator, operation)


def _check_access(generator: "Generator", operation: Operation) -> None:
    program, pointer = generator.program, operation.operands[0]
    assert program.provenance is not None, "the caller checks"
    roots = program.provenance.roots(pointer)
    if not roots:  # unknown, or no pointer at all
        return
    verb, mask_number = _ACCESSES[operation.name]
    pointee = pointer.type.pointee or "i8"
    nest = Nest(pointer.type.shape or (), generator.names)
    nest.walk_plainly()
    indices = tuple(nest.indices)
    place = generator.operand(pointer, indices, nest)
    masks = operation.operands[mask_number : mask_number + 1]
    mask = generator.operand(masks[0], indices, nest) if masks else None
    bits = memory.access(place, pointee, mask, nest).bits or f"{memory.ALL_LANES}u"
    addresses, allowed, outside, lane = (generator.names.new(prefix) for prefix in ("p", "f", "w", "l"))
    arguments, width = program.kernel.arguments, WIDTH[pointee]
    names = ", ".join(c_string(arguments[root].name) for root in roots)
    where = c_string(f"{program.kernel.name}: {operation.line}")
    index = index_text(pointer, f"{nest.flat.text} + {lane}") if pointer.type.is_tensor else '""'
    generator.lines += [
        "{",
        f"static const int {allowed}_roots[] = {{{', '.join(map(str, roots))}}};",
        f"static const char* const {allowed}_names[] = {{{names}}};",
        f"const tcpu::Allowed {allowed}{{args, {len(arguments)}, {len(roots)}, {allowed}_roots, {allowed}_names}};",
    ]
    nest.emit(f"uint64_t {addresses}[{LANES}];")
    nest.emit(f"tcpu::store_bits<uint64_t>({addresses}, {as_vector(memory.to_address(place, pointee))});")
    nest.emit(
        f"if (const uint32_t {outside} = tcpu::lanes_outside({allowed}, {addresses}, {width}, {bits})) {{\n"
        f"const int {lane} = __builtin_ctz({outside});\n"
        f"tcpu::fail_access({allowed}, {addresses}[{lane}], {width}, report, {where}, {PROGRAM}, {c_string(verb)}, "
        f"{index});\n"
        "return;\n}"
    )
    generator.lines += [*nest.lines(), "}"]


def _check_gather(generator: "Generator", operation: Operation) -> None:
    source, index = operation.operands
    extent = shape_of(source.type)[operation.attributes["axis"]]
    nest = Nest(shape_of(index.type), generator.names)
    nest.walk_plainly()
    value = memory.as_integer(generator.evaluate(index, tuple(nest.indices), nest))
    indices, outside = generator.names.new("p"), generator.names.new("w")
    nest.emit(f"const tcpu::vec<int64_t> {indices} = {as_vector(value)};")
    beyond = f"tcpu::cmp_ge((tcpu::vec<uint64_t>){indices}, tcpu::splat<uint64_t>({extent}))"
    found = f"(long long){indices}[__builtin_ctz({outside})]"
    report = failure(
        generator, operation, "OUT_OF_BOUNDS", f'"gather of element %lld from an axis of {extent}", {found}'
    )
    nest.emit(f"if (const uint32_t {outside} = tcpu::movemask({beyond}) & {nest.existing}) {report}")
    generator.lines += nest.lines()
