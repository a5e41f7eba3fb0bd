"""The native launcher: built once for this machine, kept in Triton's cache, opened once a process."""

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import sysconfig
import threading
from pathlib import Path
from typing import Any

from vllm_triton.compile.triton_cpu import settings, toolchain
from vllm_triton.compile.triton_cpu.errors import CompileError

logger = logging.getLogger(__name__)

_MODULE = "triton_cpu_launcher"
_building = threading.Lock()
_FLAGS = ("-O2", "-pthread")
_POINTER = ctypes.c_void_p
_SLOTS = ctypes.POINTER(ctypes.c_uint64)
_GRID = (ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)


class Report(ctypes.Structure):
    """How a launch failed: runtime/report.h."""

    _fields_ = (("kind", ctypes.c_int32), ("text", ctypes.c_char * 1020))


_REPORT = ctypes.POINTER(Report)
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "triton_cpu_load": (_POINTER, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)),
    "triton_cpu_release": (None, (_POINTER,)),
    "triton_cpu_launch": (ctypes.c_bool, (_POINTER, _SLOTS, ctypes.c_size_t, *_GRID, ctypes.c_int, _REPORT)),
    "triton_cpu_shared_launches": (ctypes.c_uint64, ()),
    "triton_cpu_list_new": (_POINTER, ()),
    "triton_cpu_list_delete": (None, (_POINTER,)),
    "triton_cpu_list_length": (ctypes.c_size_t, (_POINTER,)),
    "triton_cpu_list_append": (None, (_POINTER, _POINTER, _SLOTS, ctypes.c_size_t, *_GRID)),
    "triton_cpu_list_extend": (None, (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_size_t)),
    "triton_cpu_list_replay": (ctypes.c_bool, (_POINTER, ctypes.c_int, _REPORT)),
    "triton_cpu_recorder": (_POINTER, ()),
    "triton_cpu_record": (None, (_POINTER,)),
}


@functools.cache
def native() -> ctypes.CDLL:
    """The launcher's C functions; calls release the interpreter.

    Raises: CompilerNotFoundError, CompileError.
    """
    path, _ = built()
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def extension() -> Any | None:
    """The same library as a Python module with the type `Launcher`, or None where Python's headers are missing.

    Raises: CompilerNotFoundError, CompileError.
    """
    path, is_module = built()
    if not is_module:
        return None
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None, "a specification with a loader is never missing"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def built() -> tuple[Path, bool]:
    """The library, and whether it is a Python module too.

    Raises: CompilerNotFoundError, CompileError.
    """
    with _building:  # one thread builds it, others wait
        return _build()


@functools.cache
def _build() -> tuple[Path, bool]:
    sources = [toolchain.BACKEND_FOLDER / "native" / name for name in ("launcher.cpp", "extension.cpp")]
    if settings.launcher() == "ctypes":
        return _cached(sources[:1], _FLAGS), False
    headers = sysconfig.get_path("include")
    try:
        if not Path(headers, "Python.h").is_file():
            raise CompileError(f"Python.h is not in {headers}")
        return _cached(sources, (*_FLAGS, f"-I{headers}")), True
    except CompileError as error:
        logger.warning("kernels launch through ctypes, some microseconds slower each: %s", error)
        return _cached(sources[:1], _FLAGS), False


def _cached(sources: list[Path], flags: tuple[str, ...]) -> Path:
    from triton.runtime.cache import get_cache_manager

    abi = sysconfig.get_config_var("SOABI") or ""
    key = "\0".join([toolchain.fingerprint(), abi, *flags, *(source.name for source in sources)])
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    name = f"{_MODULE}.so"
    found = cache.get_file(name) or cache.put(toolchain.find_compiler().build(sources, flags), name)
    return Path(found)
