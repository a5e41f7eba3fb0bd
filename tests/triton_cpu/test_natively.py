"""Runs the other files of this folder, and suites of the ops and the engine, in processes that do not interpret Triton:
there the engine runs on Triton kernels alone.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_triton.compile.triton_cpu import toolchain

_FOLDER = Path(__file__).parent
_LONG = ("test_elementwise.py", "test_isas.py", "test_checks.py", "test_engine.py", "test_inductor.py")
# The others share processes, of which each takes seconds to start.
_SHORT = sorted({file.name for file in _FOLDER.glob("test_*.py")} - {*_LONG, "test_ops.py", Path(__file__).name})
# Here they draw more than the interpreter can.
_DRAWS = ("../ops/test_rejection_sample.py", "../ops/test_sample_tokens.py")
# What else is there compares layers, not kernels.
_QUANTIZED = tuple(
    f"../quantization/test_{part}.py" for part in ("int4_experts", "int4_models", "scaled_experts", "steps")
)
_BOTH_LAUNCHERS = ("test_debugging.py", "test_launch.py", "test_recording.py")
# Once more with bounds checks: every op's kernel among them.
_CHECKED_TOO = ("test_functions.py", "test_kernels.py", "test_operations.py")
_NATIVE, _CTYPES = {"VLLM_TRITON_CPU_LAUNCHER": "native"}, {"VLLM_TRITON_CPU_LAUNCHER": "ctypes"}
_CHECKED = {"VLLM_TRITON_CPU_CHECK": "1"}
# Every replay of a graph is compared with the same step uncaptured.
_GRAPHS_CHECKED = {"VLLM_TRITON_GRAPH_CHECK": "1"}
_DEFAULTS = {"VLLM_TRITON_CPU_CHECK": "0", "VLLM_TRITON_GRAPH_CHECK": "0"}
# The longest first, so that no worker is left with one alone at the end.
_CASES = {
    "models": (["../models"], _NATIVE | _GRAPHS_CHECKED),
    "quantization": (_QUANTIZED, _NATIVE | _GRAPHS_CHECKED),
    "ops": (["test_ops.py"], _NATIVE),
    "engine": (["../engine"], _NATIVE | _GRAPHS_CHECKED),
    "ops, checked": (["test_ops.py"], _NATIVE | _CHECKED),
    **{f"short {part}": (_SHORT[part::3], _NATIVE) for part in range(3)},
    **{file: ([file], _NATIVE) for file in _LONG},
    "draws": (_DRAWS, _NATIVE),
    "serve": (["../serve"], _NATIVE),
    "short, checked": (_CHECKED_TOO, _NATIVE | _CHECKED),
    "short, by ctypes": (_BOTH_LAUNCHERS, _CTYPES),
}


@pytest.mark.timeout(900)  # each test of such a process has the usual limit
@pytest.mark.parametrize(("files", "variables"), _CASES.values(), ids=_CASES)
def test_in_a_process_of_their_own(files, variables):
    if reason := toolchain.why_no_compiler():
        pytest.skip(reason)
    # What pytest-xdist and pytest-cov set for this process is not for its child.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *(str(_FOLDER / file) for file in files)],
        env=inherited | _DEFAULTS | variables | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
