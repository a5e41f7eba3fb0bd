"""Runs the other files of this folder, and the suites of the engine, in processes that do not interpret Triton: there
the engine runs on Triton kernels alone.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_triton.compile.triton_cpu import toolchain

_FILES = sorted(file.name for file in Path(__file__).parent.glob("test_*.py") if file.name != Path(__file__).name)
_BOTH_LAUNCHERS = ("test_debugging.py", "test_launch.py", "test_recording.py")
# Once more with bounds checks: every op's kernel among them.
_CHECKED_TOO = ("test_functions.py", "test_kernels.py", "test_operations.py", "test_ops.py")
_ENGINE = ("../engine", "../models", "../serve")
# Here every replay of a graph is compared with the same step uncaptured.
_GRAPHS_CHECKED = ("../engine", "../models")
_CASES = [
    *((name, "native", "0") for name in _ENGINE),
    *((name, "native", "0") for name in _FILES),
    *((name, "ctypes", "0") for name in _BOTH_LAUNCHERS),
    *((name, "native", "1") for name in _CHECKED_TOO),
]


@pytest.mark.timeout(900)  # each test of such a process has the usual limit
@pytest.mark.parametrize(("file", "launcher", "checked"), _CASES)
def test_in_a_process_of_its_own(file, launcher, checked):
    if reason := toolchain.why_no_compiler():
        pytest.skip(reason)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "VLLM_TRITON_CPU_LAUNCHER": launcher}
    environment["VLLM_TRITON_CPU_CHECK"] = checked
    environment["VLLM_TRITON_GRAPH_CHECK"] = str(int(file in _GRAPHS_CHECKED))
    # What pytest-xdist and pytest-cov set for this process is not for its child.
    environment = {name: value for name, value in environment.items() if not name.startswith(("PYTEST_", "COV_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    path = Path(__file__).parent / file
    result = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
