"""Functions in C++: the kernel, which Triton's launch calls, and those that it calls because they were not inlined.

A called function takes scalars by value; it writes its results where the caller says: scalars through pointers to them,
tensors into the caller's buffers. It returns nothing itself.
"""

from typing import TYPE_CHECKING

from vllm_triton.compile.triton_cpu.codegen import control, ranges
from vllm_triton.compile.triton_cpu.codegen.provenance import Provenance
from vllm_triton.compile.triton_cpu.codegen.types import STORAGE, scalar_type
from vllm_triton.compile.triton_cpu.ir import Function, Module, Operation, Region, Type
from vllm_triton.compile.triton_cpu.parser import parse

if TYPE_CHECKING:
    from vllm_triton.compile.triton_cpu.codegen.kernel import Generator

_PROGRAM = ("pid_x", "pid_y", "pid_z", "num_x", "num_y", "num_z")


def generate(ttir: str, is_checked: bool = False) -> str:
    """C++ that exports `void <kernel>(const uint64_t* args, pid_x, pid_y, pid_z, num_x, num_y, num_z)`.

    args holds 8 bytes for each argument of the kernel: an address, a sign-extended integer, or a float's bits. A kernel
    that can fail takes a `tcpu::Report* report` behind these (runtime/report.h), and one with bounds checks finds more
    in args (runtime/bounds.h).

    Raises: UnsupportedOperationError, ParseError.
    """
    return Program(parse(ttir), is_checked).source()


class Program:
    """A kernel and the functions that it calls."""

    def __init__(self, module: Module, is_checked: bool):
        self.kernel = module.kernel
        self.called = {
            name: f"function_{number}" for number, name in enumerate(module.functions) if name != self.kernel.name
        }
        self.functions = module.functions
        for function in self.functions.values():
            ranges.drop_masks(function)
        self.provenance = Provenance(module) if is_checked else None
        self.can_fail = is_checked or any(_has_assertion(function.body) for function in module.functions.values())
        shared = [("const uint64_t*", "args"), *(("int32_t", name) for name in _PROGRAM)]
        if self.can_fail:
            shared.append(("tcpu::Report*", "report"))
        self._shared: dict[str, str] = {}
        # What every function takes first.
        self.parameters = ", ".join(f"{type_} {name}" for type_, name in shared)
        self.arguments = [name for _, name in shared]

    def source(self) -> str:
        heads = [f"static {self._head(name)};" for name in self.called]
        bodies = [self._called(self.functions[name]) for name in self.called]
        bodies.append(self._kernel())
        shared = [f"static auto {name}{text}" for text, name in self._shared.items()]
        return "\n".join(['#include "kernel.h"\n', *heads, *shared, *bodies]) + "\n"

    def share(self, text: str) -> str:
        """The name of the function with these parameters and this body, `(...) {...}`, which is written once."""
        return self._shared.setdefault(text, f"shared_{len(self._shared)}")

    def _kernel(self) -> str:
        generator = self._generator(self.kernel)
        for index, argument in enumerate(self.kernel.arguments):
            type_ = argument.type
            self._refuse_tensors(self.kernel, type_)
            name = generator.names.new("a")
            if type_.is_pointer:
                text = f"auto* {name} = ({scalar_type(type_)})args[{index}];"
            else:
                text = f"const {scalar_type(type_)} {name} = tcpu::argument<{scalar_type(type_)}>(args[{index}]);"
            generator.declarations.append(text)
            generator.scalars[argument] = generator.variable(name, type_)
        control.emit_blocks(generator, self.kernel.body, lambda terminator: generator.lines.append("return;"))
        name = self.kernel.name
        marks = f"bool {name}_can_fail = true;" if self.can_fail else ""
        if self.provenance is not None:
            marks += f" int32_t {name}_checked_arguments = {len(self.kernel.arguments)};"
        marks = f'extern "C" {{ {marks} }}\n' if marks else ""
        return f'{marks}extern "C" void {name}({self.parameters}) {{\n{self._body(generator)}\n}}'

    def _called(self, function: Function) -> str:
        generator = self._generator(function)
        for argument, name in zip(function.arguments, _names("in", function.arguments), strict=True):
            generator.scalars[argument] = generator.variable(name, argument.type)

        def finish(terminator: Operation) -> None:
            for value, name in zip(terminator.operands, _names("out", terminator.operands), strict=True):
                if value.type.is_tensor:
                    generator.materialise(value, generator.buffer(name, value.type))
                else:
                    target = generator.variable(f"(*{name})", value.type)
                    generator.assign(target, generator.scalar(value), value.type)
            generator.lines.append("return;")

        control.emit_blocks(generator, function.body, finish)
        return f"static {self._head(function.name)} {{\n{self._body(generator)}\n}}"

    def _head(self, name: str) -> str:
        function = self.functions[name]
        parameters = [self.parameters]
        for argument, parameter in zip(function.arguments, _names("in", function.arguments), strict=True):
            self._refuse_tensors(function, argument.type)
            parameters.append(f"{scalar_type(argument.type)} {parameter}")
        for type_, parameter in zip(function.result_types, _names("out", function.result_types), strict=True):
            parameters.append(f"{STORAGE[type_.element] if type_.is_tensor else scalar_type(type_)}* {parameter}")
        return f"__attribute__((noinline)) void {self.called[name]}({', '.join(parameters)})"

    def _body(self, generator: "Generator") -> str:
        used = " ".join(f"(void){name};" for name in self.arguments)
        lines = generator.lines
        if generator.streams:
            lines = ["tcpu::fence();\nreturn;" if line == "return;" else line for line in lines]
        return "\n".join([used, *generator.declarations, *lines])

    def _generator(self, function: Function) -> "Generator":
        from vllm_triton.compile.triton_cpu.codegen.kernel import Generator

        return Generator(function, self)

    @staticmethod
    def _refuse_tensors(function: Function, type_: Type) -> None:
        if type_.is_tensor:
            raise control.unsupported_function(function, f"an argument of type {type_}")


def emit_call(generator: "Generator", operation: Operation) -> None:
    """tt.call."""
    arguments = [*generator.program.arguments]
    for operand in operation.operands:
        value = generator.scalar(operand)
        arguments.append(generator.text(value, operand.type))
    for result in operation.results:
        if result.type.is_tensor:
            generator.buffers[result] = generator.new_buffer(result.type)
            arguments.append(generator.buffers[result].name)
        else:
            target = generator.scalars[result] = generator.declare(result.type)
            arguments.append(f"&{target.base or target.text}")
    name = generator.program.called[operation.callee]
    generator.lines.append(f"{name}({', '.join(arguments)});")
    if generator.program.can_fail:
        generator.lines.append("if (tcpu::failed(report)) return;")


def _has_assertion(region: Region) -> bool:
    operations = [operation for block in region.blocks for operation in block.operations]
    return any(operation.name == "tt.assert" or any(map(_has_assertion, operation.regions)) for operation in operations)


def _names(prefix: str, items: list) -> list[str]:
    return [f"{prefix}_{number}" for number in range(len(items))]
