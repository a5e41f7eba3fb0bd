"""Triton kernels compiled ahead of time, from the real configurations that implementations declare."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_triton.ops.errors import RegistryError
from vllm_triton.ops.launch import CompileCase
from vllm_triton.ops.platforms import triton_interprets
from vllm_triton.ops.registry import OPS

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
_BINARY = {"cuda": "cubin", "hip": "hsaco"}
# Tensors that torch allocates start at a multiple of 16 bytes, and a launch specialises on it.
_ALIGNED = (("tt.divisibility", 16),)


def compile_case(case: CompileCase, target: str) -> Any:
    """Compiles one configuration of one kernel.

    Args:
        case: the kernel with its signature, constexprs, warps and stages.
        target: one of TARGETS.
    Returns: Triton's compiled kernel: `.asm` holds every stage ("ttir", "ptx", "cubin", "hsaco", ...) and `.metadata`
        the resources.
    Raises: RegistryError for an unknown target, a signature that does not match the kernel's arguments, or a process
        in which Triton interprets; Triton's own errors where the kernel does not compile.
    """
    if target not in TARGETS:
        raise RegistryError(f"compile_case: target must be one of {', '.join(TARGETS)}, got {target!r}")
    if triton_interprets():
        raise RegistryError(
            "compile_case: TRITON_INTERPRET must be unset before triton is imported, got an interpreter"
        )
    arguments: Sequence[str] = case.kernel.arg_names  # type: ignore[attr-defined]
    declared = set(case.signature) | set(case.constexprs)
    if declared != set(arguments):
        raise RegistryError(
            f"{kernel_name(case)}: compile case must give each of {', '.join(arguments)}, "
            f"got a difference in {', '.join(sorted(declared ^ set(arguments)))}"
        )
    signature = {name: case.signature.get(name, "constexpr") for name in arguments}
    pointers = [index for index, name in enumerate(arguments) if signature[name].startswith("*")]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=dict(case.constexprs),
        attrs={(index,): [list(attribute) for attribute in _ALIGNED] for index in pointers},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=TARGETS[target], options=options)


def kernel_name(case: CompileCase) -> str:
    return case.kernel.__name__


@dataclass(frozen=True)
class KernelReport:
    """What became of one compile case.

    case: its index among the implementation's cases.
    binary_bytes: size of the cubin or hsaco, 0 where it did not compile.
    shared_bytes: shared memory of one program.
    error: why it did not compile, or None.
    """

    op: str
    implementation: str
    case: int
    kernel: str
    target: str
    binary_bytes: int = 0
    shared_bytes: int = 0
    error: str | None = None


def report(targets: Sequence[str] = tuple(TARGETS)) -> list[KernelReport]:
    """Compiles every case in the registry for these targets; a failure is a row with its error, not an exception.

    A case has no row for a target that it is `without`.
    """
    rows = []
    for op in OPS.values():
        for implementation in op.implementations.values():
            for index, case in enumerate(implementation.compile_cases):
                for target in (name for name in targets if name not in case.without):
                    row = KernelReport(op.name, implementation.name, index, kernel_name(case), target)
                    rows.append(_compiled(row, case))
    return rows


def _compiled(row: KernelReport, case: CompileCase) -> KernelReport:
    try:
        kernel = compile_case(case, row.target)
    except Exception as error:  # a kernel can fail in any stage of the compiler; the row says how
        return dataclasses.replace(row, error=f"{type(error).__name__}: {error}")
    binary = kernel.asm[_BINARY[TARGETS[row.target].backend]]
    return dataclasses.replace(row, binary_bytes=len(binary), shared_bytes=kernel.metadata.shared)
