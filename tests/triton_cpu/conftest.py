"""Kernels here run natively. The process of the other tests interprets Triton, as settled at triton's import: there
only `test_natively.py` is collected, and it starts processes for the other files, which are collected then.

One of them alone: TRITON_INTERPRET=0 python -m pytest tests/triton_cpu/test_launch.py
"""

import os
from pathlib import Path

import pytest

NATIVE = os.environ.get("TRITON_INTERPRET") == "0"
_FOLDER = Path(__file__).parent

collect_ignore = ["test_natively.py"]
if not NATIVE:
    collect_ignore = [file.name for file in _FOLDER.glob("test_*.py") if file.name != "test_natively.py"]


@pytest.fixture(autouse=True)
def _restore_threads():
    if not NATIVE:
        yield
        return
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def driver():
    """Triton's active driver, this backend's."""
    import triton

    return triton.runtime.driver.active


@pytest.fixture
def native_kernel(monkeypatch, tmp_path):
    """Makes a kernel of a Python function's signature and of C++ written by hand in place of its body.

    `native_kernel(function, body)`: the body sees `args` (8-byte slots), `pid_x` to `pid_z` and `num_x` to `num_z`.
    """
    import triton

    from vllm_triton.compile.triton_cpu import compiler, library

    library.native()  # stays in the cache of every day
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    sources = {}
    monkeypatch.setattr(compiler, "make_cpp", lambda module, options: sources[module.get_entry_func_name()])

    def make(function, body):
        sources[function.__name__] = _SOURCE.format(name=function.__name__, body=body)
        return triton.jit(function)

    return make


_SOURCE = """
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

// Waits at most 20 seconds for a value to be reached; false says that it was not.
static bool wait_for(std::atomic<int64_t>& value, int64_t wanted) {{
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (value.load() < wanted)
        if (std::chrono::steady_clock::now() > end) return false;
    return true;
}}

static std::atomic<int64_t>& counter(uint64_t address, int index) {{
    return reinterpret_cast<std::atomic<int64_t>*>(address)[index];
}}

extern "C" void {name}(const uint64_t* args, int32_t pid_x, int32_t pid_y, int32_t pid_z, int32_t num_x, int32_t num_y,
                       int32_t num_z) {{
    {body}
}}
"""
