"""What all kernels share, built in the background while the process has other things to do."""

import threading

from vllm_triton.compile.triton_cpu import library, precompiled, settings, toolchain
from vllm_triton.compile.triton_cpu.errors import TritonCpuError


def prepare() -> threading.Thread:
    """Starts to build the launcher and the precompiled header, three seconds where no cache has them; a kernel that
    needs them sooner waits. Errors are left to it as well.
    """
    thread = threading.Thread(target=_build, name="triton_cpu-prepare", daemon=True)
    thread.start()
    return thread


def _build() -> None:
    try:
        compiler = toolchain.find_compiler()
        precompiled.folder(compiler, toolchain.kernel_flags(compiler, settings.instruction_set(), fp_fusion=True))
        library.built()
    except TritonCpuError:
        pass
