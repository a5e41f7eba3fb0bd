"""What is compiled again and what is not."""

import pytest
import torch
import triton

from vllm_triton.compile.triton_cpu import compiler, toolchain
from vllm_triton.compile.triton_cpu.errors import CompileError, SettingError, TritonCpuError


def _increment(out):
    pass


def test_compiled_once_and_then_loaded(native_kernel, monkeypatch):
    kernel = native_kernel(_increment, "counter(args[0], 0).fetch_add(1);")
    out = torch.zeros(1, dtype=torch.int64)
    first = kernel[(1,)](out)
    assert set(first.asm) >= {"ttir", "cpp", "so"}
    assert "tt.func public @_increment" in first.asm["ttir"] and "loc(" in first.asm["ttir"]

    def refuse(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(toolchain, "build_kernel", refuse)
    kernel.device_caches.clear()
    kernel[(1,)](out)
    kernel[(1,)](out, num_warps=8, num_stages=1)  # say nothing to a CPU
    assert out.item() == 3
    with pytest.raises(AssertionError, match="compiled again"):
        kernel[(1,)](out, enable_fp_fusion=False)


def test_two_binaries_of_one_name_are_two_kernels(driver, monkeypatch, tmp_path):
    handles = []
    for number in (1, 2):
        source = f'#include <cstdint>\nextern "C" void same(const uint64_t* args) {{ *(int64_t*)args[0] = {number}; }}'
        binary = toolchain.build_kernel(source, "native")
        handles.append(driver.utils.load_binary("same", binary, 0, 0)[1])
    for number, handle in enumerate(handles, start=1):
        out = torch.zeros(1, dtype=torch.int64)
        launches = driver.LaunchList()
        launches.append(handle, [out.data_ptr()], (1, 1, 1))
        launches.replay()
        assert out.item() == number
        driver.utils.unload_module(handle)


def test_binary_that_cannot_be_opened_says_why(driver):
    with pytest.raises(TritonCpuError, match=r"_broken: its compiled code cannot be opened .*: .*"):
        driver.utils.load_binary("_broken", b"no library", 0, 0)


def test_options_that_shape_code_shape_the_key():
    options = compiler.CpuOptions()
    for shaping in ({"isa": "portable"}, {"checked": True}, {"enable_fp_fusion": False}, {"debug": True}):
        assert compiler.CpuOptions(**shaping).hash() != options.hash()
    for idle in ({"num_warps": 8}, {"num_stages": 1}, {"maxnreg": 128}, {"waves_per_eu": 2}):
        assert compiler.CpuOptions(**idle).hash() == options.hash()


def test_fingerprint_follows_compiler_cpu_and_sources(monkeypatch, tmp_path):
    fingerprints = {toolchain.fingerprint()}
    found = toolchain.find_compiler()
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "find_compiler", lambda: toolchain.Compiler(found.command, "another version"))
        fingerprints.add(toolchain.fingerprint())
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "cpu_features", lambda: frozenset({"another"}))
        fingerprints.add(toolchain.fingerprint())
    assert len(fingerprints) == 3

    (tmp_path / "runtime").mkdir()
    header = tmp_path / "runtime" / "vector.h"
    header.write_text("one")
    monkeypatch.setattr(toolchain, "BACKEND_FOLDER", tmp_path)
    hash_of_files = toolchain.backend_hash.__wrapped__
    before = hash_of_files()
    header.write_text("two")
    assert hash_of_files() != before


def test_settings_reach_the_options(monkeypatch):
    backend = triton.compiler.make_backend(triton.runtime.driver.active.get_current_target())
    monkeypatch.setenv("VLLM_TRITON_CPU_ISA", "portable")
    monkeypatch.setenv("VLLM_TRITON_CPU_CHECK", "1")
    assert backend.parse_options({"num_warps": 2, "foreign": 1}) == compiler.CpuOptions(
        isa="portable", checked=True, num_warps=2
    )
    assert backend.parse_options({"isa": "native", "checked": False}).isa == "native"
    with pytest.raises(SettingError, match="isa must be one of native, avx512, avx2, portable, got 'sse9'"):
        backend.parse_options({"isa": "sse9"})


def test_unknown_keyword_is_refused_by_name(native_kernel):
    with pytest.raises(KeyError, match="foreign"):
        native_kernel(_increment, "")[(1,)](torch.zeros(1), foreign=1)


@pytest.mark.parametrize("isa", ["native", "avx2", "portable"])
def test_instruction_sets_compile_and_keep_ieee(native_kernel, isa):
    if isa == "avx2" and not {"avx2", "fma"} <= toolchain.cpu_features():
        pytest.skip("this CPU has no AVX2")

    def _count_nan(out, data):
        pass

    body = "const float* x = (const float*)args[1]; for (int i = 0; i < 64; ++i) counter(args[0], 0) += x[i] != x[i];"
    out = torch.zeros(1, dtype=torch.int64)
    native_kernel(_count_nan, body)[(1,)](out, torch.full((64,), float("nan")), isa=isa)
    assert out.item() == 64


def test_compile_error_shows_command_and_message(native_kernel):
    def _wrong(out):
        pass

    with pytest.raises(CompileError, match=r"(?s)failed with exit status \d+:\n.*-O3 .*undeclared_thing"):
        native_kernel(_wrong, "undeclared_thing();")[(1,)](torch.zeros(1))
