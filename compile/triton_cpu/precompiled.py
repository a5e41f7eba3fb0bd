"""The header of generated kernels, compiled once for each set of flags and kept in Triton's cache."""

import functools
import hashlib
import logging
import threading
from pathlib import Path

from vllm_triton.compile.triton_cpu import toolchain
from vllm_triton.compile.triton_cpu.errors import CompileError

logger = logging.getLogger(__name__)
_building = threading.Lock()

HEADER = "kernel.h"


@functools.cache
def folder(compiler: toolchain.Compiler, flags: tuple[str, ...]) -> Path | None:
    """The folder to look in before the header's own, or None where the compiler has no such thing.

    Only GCC picks a precompiled header up by itself; it ignores one that does not fit its flags.
    """
    if compiler.is_clang:
        return None
    from triton.runtime.cache import get_cache_manager

    key = "\0".join([toolchain.fingerprint(), HEADER, *flags])
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    name = f"{HEADER}.gch"
    with _building:  # kernels that compile at the same time wait for the one header
        found = cache.get_file(name)
        if found is None:
            header = toolchain.BACKEND_FOLDER / "runtime" / HEADER
            try:
                found = cache.put(compiler.build([header], ("-x", "c++-header", *flags)), name)
            except CompileError as error:
                logger.warning("kernels compile without a precompiled header: %s", error)
                return None
    return Path(found).parent
