"""The compiler that Triton asks for stages: TTIR, C++, shared object. Imported while Triton is, so it loads little."""

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

if "triton" not in sys.modules:
    raise ImportError(f"import triton before {__name__}: Triton itself imports this module while it starts")

from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend, GPUTarget

from vllm_triton.compile.triton_cpu import settings, toolchain

_FLOAT8_TYPES = ("fp8e4nv", "fp8e5")
_DOT_PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")


def _for_gpus(default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"for_gpus": True})


@dataclass(frozen=True)
class CpuOptions:
    """What a kernel is compiled with.

    Fields marked `_for_gpus` shape code for GPUs alone: they are accepted, so that a kernel written for one runs here
    unchanged, and shape nothing, so that two values share one binary.

    isa: one of `settings.INSTRUCTION_SETS`.
    checked: bounds checks on every access.
    enable_fp_fusion: whether a * b + c may round once.
    """

    isa: str = "native"
    checked: bool = False
    enable_fp_fusion: bool = True
    debug: bool = False
    sanitize_overflow: bool = True
    instrumentation_mode: str = ""
    ir_override: str | None = None
    supported_fp8_dtypes: tuple[str, ...] = _FLOAT8_TYPES
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = _DOT_PRECISIONS
    max_num_imprecise_acc_default: int = 0
    backend_name: str = "cpu"
    # Triton reads these of every backend.
    num_warps: int = _for_gpus(4)
    num_stages: int = _for_gpus(3)
    num_ctas: int = _for_gpus(1)
    warp_size: int = _for_gpus(1)
    launch_cooperative_grid: bool = _for_gpus(False)
    extern_libs: tuple[tuple[str, str], ...] = _for_gpus(())
    arch: str | None = _for_gpus()
    # Of the backend for NVIDIA.
    maxnreg: int | None = _for_gpus()
    ptx_version: int | None = _for_gpus()
    ptx_options: str | None = _for_gpus()
    launch_pdl: bool = _for_gpus(False)
    enable_reflect_ftz: bool = _for_gpus(True)
    sched4reg: bool = _for_gpus(False)
    clc: bool = _for_gpus(False)
    min_shared_mem: int | None = _for_gpus()
    fpsan_homomorphic_casts: bool = _for_gpus(False)
    # Of the backend for AMD.
    waves_per_eu: int | None = _for_gpus()
    matrix_instr_nonkdim: int | None = _for_gpus()
    kpack: int | None = _for_gpus()
    schedule_hint: str | None = _for_gpus()
    allow_flush_denorm: bool = _for_gpus(False)

    def hash(self) -> str:
        """Of everything that shapes the code."""
        shaping = [field.name for field in dataclasses.fields(self) if not field.metadata.get("for_gpus")]
        text = "\0".join(f"{name}={getattr(self, name)!r}" for name in shaping)
        return hashlib.sha256(text.encode()).hexdigest()


class CpuBackend(BaseBackend):
    """Stages: "ttir" (Triton's module), "cpp" (text), "so" (bytes)."""

    binary_ext = "so"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        """Of the C++ compiler, the CPU and this backend's files. Raises: CompilerNotFoundError, CompileError."""
        return toolchain.fingerprint()

    def parse_options(self, opts: Mapping[str, Any]) -> CpuOptions:
        """Options that are no field here are left to Triton, which refuses what is no argument of the kernel either.

        Raises: SettingError for an instruction set that is unknown or that this CPU does not have.
        """
        known = {field.name for field in dataclasses.fields(CpuOptions)}
        given = {name: value for name, value in opts.items() if name in known and value is not None}
        options = CpuOptions(**{"isa": settings.instruction_set(), "checked": settings.checked(), **given})
        toolchain.instruction_flags(options.isa)
        return options

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: CpuOptions, language: Any = None) -> None:
        stages["ttir"] = lambda module, metadata: make_ttir(module, metadata, options)
        stages["cpp"] = lambda module, metadata: make_cpp(module, options)
        stages["so"] = lambda source, metadata: toolchain.build_kernel(source, options.isa, options.enable_fp_fusion)

    def load_dialects(self, context: Any) -> None:
        """Triton's own dialects are enough."""

    def get_module_map(self) -> dict[str, ModuleType]:
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def get_codegen_implementation(self, options: CpuOptions) -> dict[str, Callable[..., Any]]:
        return {"min_dot_size": lambda lhs_type, rhs_type: (1, 1, 1)}

    def pack_metadata(self, metadata: Any) -> tuple[int, int, int]:
        return (metadata.num_warps, metadata.num_ctas, metadata.shared)


def make_ttir(module: Any, metadata: dict[str, Any], options: CpuOptions) -> Any:
    """Triton's own simplifications; descriptors become pointers, calls are inlined where the kernel allows it."""
    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.common.add_inliner(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.ttir.add_triton_licm(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    manager.run(module, "make_ttir")
    metadata["name"] = module.get_entry_func_name()
    metadata["shared"] = 0
    return module


def make_cpp(module: Any, options: CpuOptions) -> str:
    """The kernel in C++. Raises: UnsupportedOperationError, which names the operation and the line."""
    from vllm_triton.compile.triton_cpu.codegen import generate

    return generate(str(module), options.checked)
