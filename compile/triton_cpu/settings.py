"""What the backend reads from the environment: it serves processes that know nothing of the engine."""

import os

from vllm_triton.compile.triton_cpu.errors import SettingError

INSTRUCTION_SETS = ("native", "avx512", "avx2", "portable")
LAUNCHERS = ("native", "ctypes")


def compiler() -> str:
    """CXX: the C++ compiler's command; empty (default): the first of c++, g++, clang++ that is installed."""
    return os.environ.get("CXX", "").strip()


def instruction_set() -> str:
    """VLLM_TRITON_CPU_ISA: native (default: all this machine has), avx512, avx2, or portable.

    Raises: SettingError for anything else.
    """
    return _choice("VLLM_TRITON_CPU_ISA", INSTRUCTION_SETS)


def checked() -> bool:
    """VLLM_TRITON_CPU_CHECK: 1 compiles kernels with bounds checks, 0 (default) without; a compiled kernel stays.

    Raises: SettingError for anything else.
    """
    return _choice("VLLM_TRITON_CPU_CHECK", ("0", "1")) == "1"


def launcher() -> str:
    """VLLM_TRITON_CPU_LAUNCHER: native (default; ctypes where Python's headers are missing) or ctypes.

    Raises: SettingError for anything else.
    """
    return _choice("VLLM_TRITON_CPU_LAUNCHER", LAUNCHERS)


def triton_default_backend() -> str:
    """TRITON_DEFAULT_BACKEND: the backend that Triton was told to use, or empty."""
    return os.environ.get("TRITON_DEFAULT_BACKEND", "")


def _choice(name: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name, "") or choices[0]
    if value not in choices:
        raise SettingError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value
