"""tt.print and tt.assert, and how generated code reports a failure."""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import memory
from vllm_triton.compile.triton_cpu.codegen.expressions import as_bits, as_vector
from vllm_triton.compile.triton_cpu.codegen.nest import Nest
from vllm_triton.compile.triton_cpu.codegen.types import STORAGE, UNSIGNED, shape_of
from vllm_triton.compile.triton_cpu.ir import Operation, Value

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator

PROGRAM = "tcpu::ProgramId{pid_x, pid_y, pid_z}"


def c_string(text: str) -> str:
    """A C++ literal. TTIR's text holds characters beyond ASCII as their bytes."""
    try:
        data = text.encode("latin-1")
    except UnicodeEncodeError:
        data = text.encode()
    plain = set(map(ord, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,:;()[]<>=+*/!'#&|@"))
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in data) + '"'


def failure(generator: "Generator", operation: Operation, kind: str, text: str) -> str:
    """Statements that report a failure and leave the function.

    kind: of the runtime's `Failure`. text: a C format with its arguments.
    """
    where = c_string(f"{generator.program.kernel.name}: {operation.line}")
    return f"{{ tcpu::fail(report, tcpu::{kind}, {where}, {PROGRAM}, {text}); return; }}"


def emit_assert(generator: "Generator", operation: Operation) -> None:
    """Reports the first element that is false."""
    [condition] = operation.operands
    message = c_string("".join(operation.words[:1]))
    nest = Nest(condition.type.shape or (), generator.names)
    nest.walk_plainly()
    value = generator.operand(condition, tuple(nest.indices), nest)
    if not condition.type.is_tensor:
        report = failure(generator, operation, "ASSERTION", f'"assertion failed: %s", {message}')
        nest.emit(f"if (!({value.text})) {report}")
    else:
        wrong = generator.names.new("w")
        index = index_text(condition, f"{nest.flat.text} + __builtin_ctz({wrong})")
        text = f'"assertion failed at index (%s): %s", {index}, {message}'
        report = failure(generator, operation, "ASSERTION", text)
        nest.emit(f"if (const uint32_t {wrong} = ~{as_bits(value)} & {nest.existing}) {report}")
    generator.lines += nest.lines()


def emit_print(generator: "Generator", operation: Operation) -> None:
    """One line for each element, all of the first operand before the second."""
    prefix = c_string("".join(operation.words[:1]))
    if not operation.operands:
        generator.lines.append(f"tcpu::print_text({PROGRAM}, {prefix});")
    is_hex = str(bool(operation.attributes.get("hex"))).lower()
    for number, operand in enumerate(operation.operands):
        which = number if len(operation.operands) > 1 else -1
        is_signed = bool(operation.attributes["isSigned"][number])
        nest = Nest(operand.type.shape or (), generator.names)
        value = generator.operand(operand, tuple(nest.indices), nest)
        element = operand.type.element
        if element == "ptr":
            value = memory.to_address(value, operand.type.pointee or "i8")
        storage = STORAGE[element] if is_signed or element not in UNSIGNED else UNSIGNED[element]
        head = f"{PROGRAM}, {prefix}, {which}"
        if operand.type.is_tensor:
            lanes = f"({as_vector(value)} & 1)" if element == "i1" else as_vector(value)
            shape = ", ".join(map(str, shape_of(operand.type)))
            call = f"tcpu::print_lanes<{storage}, {is_hex}, {shape}>"
            nest.emit(f"{call}({head}, {nest.flat.text}, {nest.existing}, {lanes});")
        else:
            text = f"int32_t({value.text})" if element == "i1" else value.text
            nest.emit(f"tcpu::print<{storage}, {is_hex}>({head}, {text});")
        generator.lines += nest.lines()
    generator.lines.append("std::fflush(stdout);")


def index_text(value: Value, flat: str) -> str:
    """C++ of the indices, as text, of the element with this number."""
    return f"tcpu::index_text<{', '.join(map(str, shape_of(value.type)))}>({flat}).text"
