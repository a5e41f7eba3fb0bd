"""The same kernels compiled for each instruction set, in a process for each, give the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_triton.compile.triton_cpu import settings, toolchain
from vllm_triton.compile.triton_cpu.errors import SettingError

# native has products of bf16 and int8 pairs where the CPU has them, avx512 never.
ISAS = settings.INSTRUCTION_SETS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By instruction set, of those that this CPU has."""
    folder = tmp_path_factory.mktemp("isas")
    program = Path(__file__).with_name("isa_kernels.py")
    found = {}
    for isa in ISAS:
        try:
            toolchain.instruction_flags(isa)
        except SettingError:
            continue
        path = folder / f"{isa}.pt"
        environment = {
            **os.environ,
            "VLLM_TRITON_CPU_ISA": isa,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
        }
        done = subprocess.run(
            [sys.executable, str(program), str(path)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{isa}: {done.stderr}"
        found[isa] = torch.load(path)
    return found


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "portable"])
def test_equals_portable(results, isa):
    if isa not in results:
        pytest.skip(f"this CPU does not have {isa}")
    assert results[isa].keys() == results["portable"].keys() and len(results[isa]) == 38
    for name, tensors in results[isa].items():
        for actual, expected in zip(tensors, results["portable"][name], strict=True):
            if name == "exponential":  # without fused multiply and add the last bit differs
                torch.testing.assert_close(actual, expected, rtol=2**-22, atol=2**-149)
            else:
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=name)


def test_exponential_is_right(results):
    x = torch.linspace(-110, 95, 1024)
    for isa, result in results.items():
        torch.testing.assert_close(result["exponential"][0], x.double().exp().float(), rtol=2**-22, atol=1e-44, msg=isa)
