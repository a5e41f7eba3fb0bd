"""Finding a compiler, and machines without one."""

import os
import subprocess
import sys

import pytest

from vllm_triton.compile.triton_cpu import precompiled, settings, toolchain
from vllm_triton.compile.triton_cpu.errors import CompileError, CompilerNotFoundError, SettingError


def run(code, **environment):
    """What `code` prints in a process with these variables; None takes one away."""
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr.strip()


def test_cxx_wins_and_may_have_arguments(monkeypatch, tmp_path):
    program = tmp_path / "my-compiler"
    program.write_text("#!/bin/sh\necho my compiler 1.2 $1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", f"{program} -pipe")
    assert toolchain.find_compiler() == toolchain.Compiler((str(program), "-pipe"), "my compiler 1.2 -pipe")


def test_first_candidate_on_the_path_is_taken(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("clang++", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert toolchain.compiler_command() == (str(tmp_path / name),)


def test_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX names the C++ compiler 'no-such-compiler'" in toolchain.why_no_compiler()
    monkeypatch.setenv("CXX", "g++ 'half a quotation")
    assert "CXX is no command (No closing quotation)" in toolchain.why_no_compiler()
    monkeypatch.delenv("CXX")
    with pytest.raises(CompilerNotFoundError, match=r"looked for c\+\+, g\+\+, clang\+\+\): install"):
        toolchain.find_compiler()


@pytest.mark.parametrize("name", ["VLLM_TRITON_CPU_ISA", "VLLM_TRITON_CPU_CHECK", "VLLM_TRITON_CPU_LAUNCHER"])
def test_unknown_settings_list_the_valid_ones(monkeypatch, name):
    monkeypatch.setenv(name, "maybe")
    readers = (settings.instruction_set, settings.checked, settings.launcher)
    errors = []
    for read in readers:
        try:
            read()
        except SettingError as error:
            errors.append(str(error))
    assert len(errors) == 1 and errors[0].startswith(f"{name} must be one of ") and "'maybe'" in errors[0]


def test_instruction_set_beyond_this_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(toolchain, "cpu_features", lambda: frozenset(toolchain._AVX2))
    assert "-mavx2" in toolchain.instruction_flags("avx2")
    with pytest.raises(SettingError, match=r"isa avx512 needs avx512f, .* which this CPU does not have"):
        toolchain.instruction_flags("avx512")


GCC = toolchain.Compiler(("g++",), "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022")
CLANG = toolchain.Compiler(("clang++",), "Debian clang version 16.0.6\nTarget: x86_64-pc-linux-gnu")


def test_flags_of_kernels(monkeypatch):
    monkeypatch.setattr(toolchain, "cpu_features", lambda: frozenset(toolchain._AVX2))
    flags = toolchain.kernel_flags(GCC, "avx2", fp_fusion=True)
    assert {"-O3", "-mavx2", "-mmove-max=256", "-ffp-contract=fast"} <= set(flags)
    assert not {"-ffast-math", "-ffinite-math-only", "-Ofast"} & set(flags)
    assert "-ffp-contract=off" in toolchain.kernel_flags(GCC, "avx2", fp_fusion=False)
    assert "-mmove-max=256" not in toolchain.kernel_flags(CLANG, "avx2", fp_fusion=True)
    assert "-DTCPU_PORTABLE" in toolchain.kernel_flags(CLANG, "portable", fp_fusion=True)


def test_versions_are_read():
    assert (GCC.major_version, GCC.is_clang) == (12, False)
    assert (CLANG.major_version, CLANG.is_clang) == (16, True)
    assert toolchain.Compiler(("cc",), "unknown").major_version == 0


@pytest.fixture
def no_header_remembered():
    precompiled.folder.cache_clear()
    yield
    precompiled.folder.cache_clear()


def test_precompiled_header_speaks_for_itself(monkeypatch, tmp_path, no_header_remembered):
    """The folder of the precompiled header comes first: what is compiled there is what the source sees."""
    compiler = toolchain.find_compiler()
    if compiler.is_clang:
        pytest.skip("clang picks no precompiled header up by itself")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setattr(toolchain, "BACKEND_FOLDER", tmp_path)
    (runtime / "kernel.h").write_text("inline int answer() { return 42; }")
    source = '#include "kernel.h"\nextern "C" int get() { return answer(); }'
    assert b"\x7fELF" in toolchain.build_kernel(source, "portable")
    (runtime / "kernel.h").write_text("#error not precompiled")
    assert b"\x7fELF" in toolchain.build_kernel(source, "portable")
    with pytest.raises(CompileError, match="not precompiled"):
        toolchain.build_kernel("// another first line\n" + source, "portable")


def test_header_that_does_not_compile_leaves_a_warning(monkeypatch, tmp_path, caplog, no_header_remembered):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "BACKEND_FOLDER", tmp_path)
    assert precompiled.folder(toolchain.find_compiler(), ("-O1",)) is None
    assert "kernels compile without a precompiled header" in caplog.text


WHY = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from vllm_triton.ops.platforms import why_not_triton
print(why_not_triton("cpu"))
print(why_not_triton("cpu"))
"""


def test_platform_uses_the_backend():
    assert run(WHY)[0] == "None\nNone"


def test_without_a_compiler_it_is_inactive_and_says_so_once(tmp_path):
    printed, logged = run(WHY, PATH=str(tmp_path), CXX=None)
    first, second = printed.splitlines()
    assert first == second and first.startswith("no C++ compiler was found") and "TRITON_INTERPRET=1" in first
    assert logged.count("Triton kernels cannot run on this CPU: no C++ compiler was found") == 1


def test_without_python_headers_it_launches_through_ctypes(tmp_path):
    code = f"""
import logging, sysconfig, triton
logging.basicConfig(level=logging.WARNING)
sysconfig.get_path = lambda name: {str(tmp_path)!r}
from vllm_triton.compile.triton_cpu import library
print(library.extension(), library.native().triton_cpu_shared_launches())
"""
    printed, logged = run(code)
    assert printed == "None 0"
    assert f"launch through ctypes, some microseconds slower each: Python.h is not in {tmp_path}" in logged


def test_broken_neighbour_does_not_take_it_down():
    code = """
import triton
from triton.backends import backends
from vllm_triton.compile.triton_cpu.driver import CpuDriver
class Broken:
    @staticmethod
    def is_active():
        raise OSError("libgpu.so is damaged")
class Active:
    @staticmethod
    def is_active():
        return True
class Backend:
    def __init__(self, driver):
        self.driver = driver
backends["broken"] = Backend(Broken)
print(CpuDriver.is_active(), CpuDriver.why_inactive())
backends["gpu"] = Backend(Active)
print(CpuDriver.is_active(), CpuDriver.why_inactive())
"""
    printed, _ = run(code)
    assert printed.splitlines() == ["True None", "False Triton runs on a GPU here (backend gpu)"]


def test_import_loads_little():
    code = "import sys, triton; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert run(code)[0] == "[]"
    code = (
        "import sys, vllm_triton.compile.triton_cpu.launching; print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    assert run(code)[0] == "False False"


def test_modules_that_triton_imports_say_to_import_triton_first():
    code = """
try:
    import vllm_triton.compile.triton_cpu.compiler
except ImportError as error:
    print(error)
import triton
import vllm_triton.compile.triton_cpu.compiler
"""
    assert run(code)[0].startswith("import triton before vllm_triton.compile.triton_cpu.compiler")
