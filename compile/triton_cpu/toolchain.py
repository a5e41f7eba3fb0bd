"""The machine's C++ compiler: which one, for which instructions, and how a source becomes a shared object."""

import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_triton.compile.triton_cpu import settings
from vllm_triton.compile.triton_cpu.errors import CompileError, CompilerNotFoundError, SettingError

logger = logging.getLogger(__name__)

BACKEND_FOLDER = Path(__file__).parent
CANDIDATES = ("c++", "g++", "clang++")

_X86_64 = ("x86_64", "AMD64")
# What each instruction set asks of the CPU, in the names of /proc/cpuinfo, and of the compiler.
_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_NEEDS = {"avx2": _AVX2, "avx512": _AVX512}
_COMPILER_NAMES = {"bmi1": "bmi"}

# Speed without giving up IEEE: NaN and infinity keep their meaning, so no -ffast-math.
# psabi: vectors wider than a register are passed by inlining alone.
# wrapv: integers wrap in Triton.
_KERNEL_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-Wno-psabi")
_COMMON_FLAGS = ("-std=c++17", "-pipe", "-fPIC", "-shared", "-fvisibility=default")
_BINARY_NAME = "kernel.so"


@dataclass(frozen=True)
class Compiler:
    """command: the program and the arguments that always go with it. version: its first lines."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version

    @property
    def major_version(self) -> int:
        """0 where the version's text holds no number of three parts."""
        numbers = re.findall(r"\b(\d+)\.\d+\.\d+", self.version.partition("\n")[0])
        return int(numbers[-1]) if numbers else 0

    def build(self, sources: Sequence[Path], flags: Sequence[str]) -> bytes:
        """The shared object that these files make.

        Raises: CompileError with the command and what the compiler said.
        """
        with tempfile.TemporaryDirectory(prefix="triton_cpu_") as folder:
            output = Path(folder, "library.so")
            command = [*self.command, *_COMMON_FLAGS, *flags, *map(str, sources), "-o", str(output)]
            result = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if result.returncode != 0:
                raise CompileError(
                    f"the C++ compiler failed with exit status {result.returncode}:\n  {shlex.join(command)}\n"
                    f"{result.stderr.strip() or result.stdout.strip()}"
                )
            return output.read_bytes()


def why_no_compiler() -> str | None:
    """The reason why no C++ compiler can be used, or None. Starts no process."""
    try:
        compiler_command()
    except CompilerNotFoundError as error:
        return str(error)
    return None


def compiler_command() -> tuple[str, ...]:
    """The compiler's command, with the program's full path.

    Raises: CompilerNotFoundError.
    """
    chosen = settings.compiler()
    if chosen:
        try:
            program, *arguments = shlex.split(chosen)
        except ValueError as error:
            raise CompilerNotFoundError(
                f"CXX is no command ({error}): correct it or unset it, got {chosen!r}"
            ) from error
        path = shutil.which(program)
        if path is None:
            raise CompilerNotFoundError(
                f"CXX names the C++ compiler {program!r}, which is not there: correct or unset CXX"
            )
        return (path, *arguments)
    for candidate in CANDIDATES:
        path = shutil.which(candidate)
        if path is not None:
            return (path,)
    raise CompilerNotFoundError(
        f"no C++ compiler was found (looked for {', '.join(CANDIDATES)}): install g++ or clang++, or set CXX"
    )


def find_compiler() -> Compiler:
    """The compiler and its version; asked once for each command.

    Raises: CompilerNotFoundError; CompileError where it cannot tell its version.
    """
    return _with_version(compiler_command())


@functools.cache
def _with_version(command: tuple[str, ...]) -> Compiler:
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        raise CompileError(f"{shlex.join(command)} --version failed: {result.stderr.strip()}")
    return Compiler(command, result.stdout.strip())


@functools.cache
def cpu_features() -> frozenset[str]:
    """What this CPU can do, in the words of /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        logger.info("cannot read /proc/cpuinfo (%s): only the instruction sets native and portable are offered", error)
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def instruction_flags(instruction_set: str) -> tuple[str, ...]:
    """The compiler's flags for one of `settings.INSTRUCTION_SETS`.

    Raises: SettingError for an unknown one, or one that this CPU does not have.
    """
    if instruction_set not in settings.INSTRUCTION_SETS:
        raise SettingError(f"isa must be one of {', '.join(settings.INSTRUCTION_SETS)}, got {instruction_set!r}")
    if instruction_set == "portable":
        return ("-DTCPU_PORTABLE",)
    if instruction_set == "native":
        return ("-march=native",) if platform.machine() in _X86_64 else ("-mcpu=native",)
    missing = [feature for feature in _NEEDS[instruction_set] if feature not in cpu_features()]
    if missing:
        raise SettingError(f"isa {instruction_set} needs {', '.join(missing)}, which this CPU does not have")
    return tuple(f"-m{_COMPILER_NAMES.get(feature, feature)}" for feature in _NEEDS[instruction_set])


def kernel_flags(compiler: Compiler, instruction_set: str, fp_fusion: bool) -> tuple[str, ...]:
    """All flags of a kernel's compilation but for include paths. fp_fusion: whether a * b + c may round once."""
    flags = [*_KERNEL_FLAGS, *instruction_flags(instruction_set)]
    flags.append("-ffp-contract=fast" if fp_fusion else "-ffp-contract=off")
    if not compiler.is_clang:
        # g++ 12 otherwise takes one scalar for another after it has threaded a branch between two of them.
        flags.append("-fno-thread-jumps")
    without_avx512 = instruction_set == "native" and "avx2" in cpu_features() and "avx512f" not in cpu_features()
    if (instruction_set == "avx2" or without_avx512) and not compiler.is_clang and compiler.major_version >= 12:
        # Vectors of two registers are otherwise copied through general ones, several times slower.
        flags.append("-mmove-max=256")
    return tuple(flags)


def build_kernel(source: str, instruction_set: str, fp_fusion: bool = True) -> bytes:
    """The shared object of one kernel's C++ text, kept by that text: what Triton tells apart, such as aligned pointers,
    often comes to the same code.

    Raises: CompilerNotFoundError, CompileError, SettingError.
    """
    from triton.runtime.cache import get_cache_manager

    compiler = find_compiler()
    flags = kernel_flags(compiler, instruction_set, fp_fusion)
    key = "\0".join([fingerprint(), *flags, source])
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if (found := cache.get_file(_BINARY_NAME)) is not None:
        return Path(found).read_bytes()
    binary = _compile(source, compiler, flags)
    cache.put(binary, _BINARY_NAME)
    return binary


def _compile(source: str, compiler: Compiler, flags: tuple[str, ...]) -> bytes:
    from vllm_triton.compile.triton_cpu import precompiled

    includes = [BACKEND_FOLDER / "runtime"]
    if source.startswith(f'#include "{precompiled.HEADER}"') and (folder := precompiled.folder(compiler, flags)):
        includes.insert(0, folder)
    with tempfile.TemporaryDirectory(prefix="triton_cpu_") as scratch:
        path = Path(scratch, "kernel.cpp")
        path.write_text(source)
        return compiler.build([path], (*flags, *(f"-I{include}" for include in includes)))


@functools.cache
def backend_hash() -> str:
    """Of every file that shapes a kernel's code: generator, headers, launcher."""
    digest = hashlib.sha256()
    for path in sorted(BACKEND_FOLDER.rglob("*")):
        if path.suffix in (".py", ".h", ".hpp", ".cpp"):
            digest.update(str(path.relative_to(BACKEND_FOLDER)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def fingerprint() -> str:
    """Of what a binary depends on beside its source and options: compiler, CPU and this backend.

    Raises: CompilerNotFoundError, CompileError.
    """
    compiler = find_compiler()
    parts = (*compiler.command, compiler.version, platform.machine(), " ".join(sorted(cpu_features())), backend_hash())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def temporary_library(binary: bytes, name: str) -> Path:
    """A new file that holds `binary`. Its name is used once: opening a name again may give what it held before."""
    handle, path = tempfile.mkstemp(prefix=f"triton_cpu_{name[:100]}_{os.getpid()}_", suffix=".so")
    with os.fdopen(handle, "wb") as file:
        file.write(binary)
    return Path(path)
