"""Every declared configuration of every kernel compiles for GPUs that are not here."""

import functools
import json
import os
import subprocess
import sys

import pytest

import vllm_triton.ops  # noqa: F401  (fills the registry)
from vllm_triton.compile.aot import TARGETS, compile_case
from vllm_triton.ops.errors import RegistryError
from vllm_triton.ops.registry import OPS

# Target by target, since the first case of a target compiles all of them: two workers seldom meet at one.
CASES = [
    pytest.param(op.name, implementation.name, index, target, id=f"{op.name}-{implementation.name}-{index}-{target}")
    for target in TARGETS
    for op in OPS.values()
    for implementation in op.implementations.values()
    for index in range(len(implementation.compile_cases))
    if target not in implementation.compile_cases[index].without
]


@functools.cache
def _rows(target: str) -> dict[tuple[str, str, int], dict]:
    """Compiles everything for one target in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "vllm_triton.compile.aot", "--json", "--target", target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == int(any(row["error"] for row in rows)), done.stderr
    return {(row["op"], row["implementation"], row["case"]): row for row in rows}


@pytest.mark.parametrize("op, implementation, index, target", CASES)
def test_compiles(op, implementation, index, target):
    row = _rows(target)[op, implementation, index]
    assert row["error"] is None, f"{row['kernel']} for {target}: {row['error']}"
    assert row["binary_bytes"] > 0, f"{row['kernel']} for {target} has no binary"


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in OPS.values() if "triton" in op.implementations])
def test_every_triton_implementation_declares_a_compile_case(op):
    assert op.implementations["triton"].compile_cases


def test_unknown_target_lists_the_valid_ones():
    case = OPS["rms_norm"].implementations["triton"].compile_cases[0]
    with pytest.raises(RegistryError, match="must be one of cuda:80, cuda:90, hip:gfx942, got 'cuda:1'"):
        compile_case(case, "cuda:1")


def test_refuses_to_compile_where_triton_interprets():
    case = OPS["rms_norm"].implementations["triton"].compile_cases[0]
    with pytest.raises(RegistryError, match="TRITON_INTERPRET must be unset"):
        compile_case(case, "cuda:90")


WRONG_CASES = """
import dataclasses, json
from vllm_triton.compile.aot import compile_case, report
from vllm_triton.ops import registry, rms_norm
from vllm_triton.ops.errors import RegistryError

implementation = rms_norm.implementations["triton"]
case = implementation.compile_cases[0]
try:
    compile_case(dataclasses.replace(case, constexprs={"E": 64, "ROWS_ALIGNED": True, "STORE": ""}), "cuda:90")
except RegistryError as error:
    print(error)
no_power_of_two = dataclasses.replace(case, constexprs={"E": 63, "BLOCK_E": 63, "ROWS_ALIGNED": True, "STORE": ""})
registry.OPS.clear()
registry.OPS["rms_norm"] = rms_norm
rms_norm.implementations = {"triton": dataclasses.replace(implementation, compile_cases=(no_power_of_two,))}
print(json.dumps([dataclasses.asdict(row) for row in report(["cuda:90"])]))
"""


def test_wrong_cases_say_what_is_wrong():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = subprocess.check_output([sys.executable, "-c", WRONG_CASES], env=environment, text=True)
    mismatch, rows = output.splitlines()
    assert mismatch.startswith("_rms_norm_kernel: compile case must give each of x_ptr, weight_ptr, ")
    assert mismatch.endswith("got a difference in BLOCK_E")
    (row,) = json.loads(rows)
    assert (row["kernel"], row["binary_bytes"]) == ("_rms_norm_kernel", 0)
    assert "power of 2" in row["error"]
