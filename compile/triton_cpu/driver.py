"""The driver that Triton asks for devices, binaries and launches. Imported while Triton is, so it loads little."""

import functools
import logging
import os
import platform
import sys
from typing import Any

if "triton" not in sys.modules:
    raise ImportError(f"import triton before {__name__}: Triton itself imports this module while it starts")

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from vllm_triton.compile.triton_cpu import settings, toolchain
from vllm_triton.compile.triton_cpu.errors import TritonCpuError

logger = logging.getLogger(__name__)

# Programs use no shared memory of a device's: no kernel asks for more than this.
_MOST_SHARED_BYTES = 2**31 - 1
_MOST_THREADS = 2**31 - 1
_ERROR_BYTES = 4096
_CPP_TYPES = {
    "i1": "int8_t",
    "u1": "uint8_t",
    "fp16": "float",
    "bf16": "float",
    "fp32": "float",
    "f32": "float",
    "fp64": "double",
}


class CpuUtils:
    """Binaries in and out of the process."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": _MOST_SHARED_BYTES,
            "multiprocessor_count": os.cpu_count() or 1,
            "warpSize": 1,
            "max_num_regs": _MOST_THREADS,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Returns: module, function (the same handle), registers, spills, most threads.

        Raises: TritonCpuError where the binary cannot be opened.
        """
        import ctypes

        from vllm_triton.compile.triton_cpu.library import native

        library = native()
        path = toolchain.temporary_library(binary, name)
        try:
            error = ctypes.create_string_buffer(_ERROR_BYTES)
            handle = library.triton_cpu_load(str(path).encode(), name.encode(), error, _ERROR_BYTES)
        finally:
            path.unlink()
        if not handle:
            message = error.value.decode(errors="replace")
            raise TritonCpuError(
                f"{name}: its compiled code cannot be opened from {path.parent}: {message} (where that folder forbids "
                "execution, set TMPDIR to another)"
            )
        return handle, handle, 0, 0, _MOST_THREADS

    def unload_module(self, module: int) -> None:
        """The code stays where a launch list still holds it."""
        if sys.is_finalizing():  # nothing can be imported any more, and the process gives all back
            return
        from vllm_triton.compile.triton_cpu.library import native

        native().triton_cpu_release(module)


class CpuDriver(DriverBase):
    """One device, number 0: this machine's CPU. Launches are synchronous, so there is one stream, 0."""

    def __init__(self) -> None:
        super().__init__()
        from vllm_triton.compile.triton_cpu.launcher import make_launcher
        from vllm_triton.compile.triton_cpu.launching import LaunchList, recording

        self.utils = CpuUtils()
        self.launcher_cls = make_launcher
        self.LaunchList = LaunchList
        self.recording = recording

    @staticmethod
    def why_inactive() -> str | None:
        """The reason why Triton does not run kernels on this CPU, or None where it does."""
        missing = toolchain.why_no_compiler()
        if missing is not None or _chosen_by_name():
            return missing
        active = _active_gpu_backends()
        return f"Triton runs on a GPU here (backend {', '.join(active)})" if active else None

    @classmethod
    def is_active(cls) -> bool:
        """Whether kernels run here: there is a C++ compiler, and no GPU or TRITON_DEFAULT_BACKEND=cpu. Never raises."""
        missing = toolchain.why_no_compiler()
        if missing is not None and not _active_gpu_backends():
            _say_once(f"Triton kernels cannot run on this CPU: {missing}")
        return cls.why_inactive() is None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", platform.machine(), 1)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        if device != 0:
            raise ValueError(f"the CPU is device 0 and the only one, got {device}")

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        from vllm_triton.compile.triton_cpu import device

        return device

    def get_benchmarker(self) -> Any:
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> Any:
        return self.get_device_interface().cache_buffer()

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Raises: TritonCpuError for a type that no argument has."""
        if ty.startswith("*"):
            return "void*"
        if ty[:1] in ("i", "u") and ty[1:] in ("8", "16", "32", "64"):
            return f"{'u' if ty[0] == 'u' else ''}int{ty[1:]}_t"
        if ty not in _CPP_TYPES:
            raise TritonCpuError(
                f"no C++ type for {ty!r}; there are pointers, i8 to i64, u8 to u64, {', '.join(_CPP_TYPES)}"
            )
        return _CPP_TYPES[ty]


def _chosen_by_name() -> bool:
    """Whether the user named this backend; older versions of Triton do not ask, and would find two active drivers."""
    import triton

    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return (major, minor) >= (3, 8) and settings.triton_default_backend() == "cpu"


def _active_gpu_backends() -> list[str]:
    from triton.backends import backends

    active = []
    for name, backend in backends.items():
        if backend.driver is CpuDriver:
            continue
        try:
            if backend.driver.is_active():
                active.append(name)
        except Exception as error:  # another backend's fault must not take this one down
            logger.warning("Triton's backend %s cannot tell whether it is active: %s", name, error)
    return active


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
