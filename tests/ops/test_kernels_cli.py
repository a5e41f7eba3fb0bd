"""`python -m vllm_triton.kernels` says what runs, why, and why not the others."""

import json
import os
import subprocess
import sys

import pytest

from vllm_triton.kernels import main
from vllm_triton.ops.registry import OPS


@pytest.fixture(autouse=True)
def no_choices_in_the_environment(monkeypatch):
    monkeypatch.delenv("VLLM_TRITON_KERNELS", raising=False)


def test_json_lists_every_op(capsys):
    assert main(["--json", "--kernels", "rms_norm=reference"]) == 0
    rows = json.loads(capsys.readouterr().out)["ops"]
    assert [row["op"] for row in rows] == sorted(OPS)
    row = next(row for row in rows if row["op"] == "rms_norm")
    assert (row["chosen"], row["why"]) == ("reference", "asked for")
    reasons = {entry["name"]: entry["rejected_because"] for entry in row["implementations"]}
    assert reasons["reference"] is None and reasons["torch"] == "reference was asked for"


def test_the_table_names_each_rejected_one_and_its_reason(capsys):
    assert main(["--kernels", "rms_norm=reference"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("rms_norm "))
    assert lines[start].split(maxsplit=1)[1] == "reference (asked for)"
    rejected = [line.strip() for line in lines[start + 1 : start + len(OPS["rms_norm"].implementations)]]
    assert "not torch: reference was asked for" in rejected


def test_the_environment_chooses_and_the_flag_wins(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_TRITON_KERNELS", "linear=reference")
    for arguments, chosen in ((["--json"], "reference"), (["--json", "--kernels", "linear=torch"], "torch")):
        assert main(arguments) == 0
        rows = json.loads(capsys.readouterr().out)["ops"]
        assert next(row["chosen"] for row in rows if row["op"] == "linear") == chosen


@pytest.mark.parametrize(
    "kernels, message",
    [
        ("rms_nrom=torch", "kernels: op must be one of "),
        ("rms_norm=trch", "rms_norm: implementation must be one of reference, "),
        ("rms_norm", "kernels: choice must have the form op=implementation, got 'rms_norm'"),
    ],
)
def test_a_bad_choice_is_one_line_and_exit_code_2(capsys, kernels, message):
    assert main(["--kernels", kernels]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(message) and output.err.count("\n") == 1


def test_runs_as_a_module_without_the_interpreter():
    """In a process of its own, the Triton kernels say why they do or do not run on this device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_triton.kernels", "--json"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout)["ops"]:
        accepted = [entry["name"] for entry in row["implementations"] if entry["rejected_because"] is None]
        assert accepted == [row["chosen"]]
