"""Builds small C++ functions over the runtime's headers, once per test run, and calls them on numpy arrays."""

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_triton.compile.triton_cpu import toolchain

HEADERS = Path(toolchain.BACKEND_FOLDER) / "runtime"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-fPIC", "-shared")

# name -> (compiler flags, CPU features that the level needs, in the words of /proc/cpuinfo). Without AVX2 the headers
# use no intrinsics, as with TCPU_PORTABLE.
LEVELS = {
    "native": (("-march=native",), ()),
    "avx512": (("-march=x86-64-v4",), ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
    "avx2": (("-march=x86-64-v3",), ("avx2", "fma", "f16c")),
    "portable": (("-DTCPU_PORTABLE",), ()),
}
# AVX-512 with and without products of pairs differs in the dot alone.
LEVELS_BESIDE_DOT = ("native", "avx2", "portable")


def _why_not(level: str) -> str | None:
    """The reason why this machine cannot run the level, or None."""
    missing = [feature for feature in LEVELS[level][1] if feature not in toolchain.cpu_features()]
    return toolchain.why_no_compiler() or (f"this CPU lacks {', '.join(missing)}" if missing else None)


@cache
def _headers_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(HEADERS.glob("*.h")):
        digest.update(path.read_bytes())
    return digest.digest()


@cache
def build(source: str, level: str) -> ctypes.CDLL:
    """`source`, C++ after an include of the runtime, as a loaded library; parallel test processes share the file.

    Skips the test where this machine cannot run the level.
    """
    if reason := _why_not(level):
        pytest.skip(reason)
    command = (*toolchain.compiler_command(), *FLAGS, *LEVELS[level][0], f"-I{HEADERS}")
    key = hashlib.sha256(_headers_digest() + repr((source, command)).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"runtime_tests_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"{key}.so"
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            text = f'#include "runtime.h"\nusing namespace tcpu;\n{source}\n'
            partial = folder / f"{key}.partial"
            result = subprocess.run(
                [*command, "-x", "c++", "-", "-o", str(partial)], input=text, capture_output=True, text=True
            )
            assert result.returncode == 0, f"{level}: {result.stderr[:4000]}"
            partial.rename(library)
    return ctypes.CDLL(str(library))


def function(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    """An extern "C" function whose arguments are arrays (their addresses), ints (int64_t) and bools."""
    target: Any = getattr(library, name)
    target.restype = None

    def call(*arguments: np.ndarray | int) -> None:
        converted: list[Any] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous
                converted.append(ctypes.c_void_p(argument.ctypes.data))
            else:
                converted.append(ctypes.c_int64(argument))
        target(*converted)

    return call


def unary(name: str, element: str, expression: str, result: str | None = None) -> str:
    """C++ of `name(in, out, n)`: expression of x over whole vectors, n a multiple of 16."""
    return (
        f'extern "C" void {name}(const {element}* in, {result or element}* out, int64_t n) {{\n'
        f"for (int64_t i = 0; i < n; i += 16) {{ const auto x = load(in + i); store(out + i, {expression}); }} }}\n"
    )


def binary(name: str, element: str, expression: str, result: str | None = None) -> str:
    """C++ of `name(a, b, out, n)`: expression of x and y over whole vectors, n a multiple of 16."""
    return (
        f'extern "C" void {name}(const {element}* a, const {element}* b, {result or element}* out, int64_t n) {{\n'
        f"for (int64_t i = 0; i < n; i += 16) {{ const auto x = load(a + i); const auto y = load(b + i);"
        f" store(out + i, {expression}); }} }}\n"
    )


def scalar_unary(name: str, element: str, expression: str) -> str:
    """The same one element at a time."""
    return (
        f'extern "C" void {name}(const {element}* in, {element}* out, int64_t n) {{\n'
        f"for (int64_t i = 0; i < n; ++i) {{ const {element} x = in[i]; out[i] = {expression}; }} }}\n"
    )


def scalar_binary(name: str, element: str, expression: str) -> str:
    return (
        f'extern "C" void {name}(const {element}* a, const {element}* b, {element}* out, int64_t n) {{\n'
        f"for (int64_t i = 0; i < n; ++i) {{ const {element} x = a[i]; const {element} y = b[i];"
        f" out[i] = ({element})({expression}); }} }}\n"
    )


def padded(values: np.ndarray) -> np.ndarray:
    """A copy whose length is a multiple of 16, filled up with its first value."""
    missing = -len(values) % 16
    return np.concatenate([values, np.repeat(values[:1], missing)])


def pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every value beside every other."""
    a, b = np.meshgrid(values, values)
    return padded(a.reshape(-1).copy()), padded(b.reshape(-1).copy())


SPECIAL_FLOATS = np.array(
    [
        *(0.0, -0.0, 1, -1, 0.5, -2.5, 3, 7.25, 0.1, 1e6, -1e10, 16777217),
        *(np.inf, -np.inf, np.nan, -np.nan, 3.4028235e38, -3.4028235e38, 1.1754944e-38, 1.17e-38, 1e-45, -1e-45),
        *(
            448,
            464,
            57344,
            61439,
            61440,
            65504,
            65519,
            65520,
            2.0**-24,
            2.0**-25,
            2.0**-10,
            2.0**-9,
            2.0**-16,
            2.0**-17,
        ),
    ],
    dtype=np.float32,
)


def some_floats(seed: int, count: int) -> np.ndarray:
    """Floats of every exponent and sign, NaN and infinity among them, after SPECIAL_FLOATS."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return padded(np.concatenate([SPECIAL_FLOATS, bits.view(np.float32)]))


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, but for NaN: any NaN equals any other."""
    assert actual.dtype == expected.dtype
    if actual.dtype.kind == "f":
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), nan)
        unsigned = f"u{actual.dtype.itemsize}"
        actual, expected = actual[~nan].view(unsigned), expected[~nan].view(unsigned)
    np.testing.assert_array_equal(actual, expected)
