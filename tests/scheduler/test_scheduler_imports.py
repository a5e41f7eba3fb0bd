"""The scheduler and the KV cache bookkeeping are plain Python."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["vllm_triton.scheduler.scheduler", "vllm_triton.kv_cache"])
def test_importing_loads_no_tensor_library(module):
    code = f"import sys, {module}; print([name for name in ('torch', 'numpy', 'triton') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
