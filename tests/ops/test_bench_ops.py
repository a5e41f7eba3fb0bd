"""The benchmark of ops times nothing that is wrong, and ends with one JSON object."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_triton.ops.registry import OPS

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench_ops(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_ops", BENCH / "ops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wrong_implementation_is_reported_and_not_timed(bench_ops, monkeypatch):
    op = OPS["silu_and_mul"]
    wrong = replace(op.implementations["torch"], name="wrong", function=lambda x: op.reference(x) + 1)
    monkeypatch.setattr(op, "implementations", {"torch": op.implementations["torch"], "wrong": wrong})
    monkeypatch.setattr(op, "contract", replace(op.contract, bench_dims={"small": {"T": 2, "I": 63}}))
    right, wrong_row = bench_ops.measure_op(op, torch.float32, "cpu", seconds=0.001)
    assert right["median_us"] > 0 and right["p20_us"] <= right["median_us"] <= right["p80_us"]
    assert "above the band" in wrong_row["error"] and "median_us" not in wrong_row


def test_what_does_not_run_here_is_left_out(bench_ops, monkeypatch):
    op = OPS["silu_and_mul"]
    refusing = replace(op.implementations["torch"], supports=lambda situation: f"no {situation.dtype}")
    monkeypatch.setattr(op, "implementations", {"torch": refusing})
    assert list(bench_ops.measure_op(op, torch.float32, "cpu", seconds=0.001)) == []


def test_refuses_to_time_the_interpreter(bench_ops, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ops.py"])
    assert bench_ops.main() == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err


def test_the_last_line_is_one_json_object():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(BENCH / "ops.py"), "--op", "rms_norm", "--seconds", "0.001"]
    output = subprocess.check_output(command, env=environment, text=True)
    result = json.loads(output.splitlines()[-1])
    assert {"machine", "commit", "torch", "triton", "roof_gb_s", "roof_gflop_s", "device", "dtype"} <= set(result)
    timed = {(row["shape"], row["implementation"]) for row in result["rows"]}
    assert timed >= {(shape, "torch") for shape in OPS["rms_norm"].contract.bench_dims}
    assert len(output.splitlines()) == len(result["rows"]) + 3  # the roof, the heading and the object
