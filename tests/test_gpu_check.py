"""The prepared run for a GPU, without one: it says so; its parts run small on a CPU; what goes wrong becomes a row."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_triton.compile.triton_cpu import toolchain
from vllm_triton.ops.registry import OPS

ROOT = Path(__file__).parents[1]
# A machine with a GPU has torch, triton and numpy, and this repository's files.
ABSENT = (
    *("fastapi", "uvicorn", "starlette", "pydantic", "prometheus_client", "openai", "httpx", "hypothesis"),
    *("transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "jinja2", "tqdm", "einops"),
)


@pytest.fixture
def run_bare(tmp_path):
    """Runs Python in a checkout without an installation of the other packages, and without a GPU."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}.", "TRITON_INTERPRET": "0"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture
def bench(monkeypatch):
    """`bench(name)`: a module of that folder."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def test_without_a_gpu_it_says_so_and_is_content(run_bare):
    assert "jinja2" in run_bare("-c", "import jinja2").stderr  # the packages are indeed absent
    done = run_bare("bench/gpu_check.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gpu_check.py: torch sees no GPU here, so there is nothing to check\n"


@pytest.mark.timeout(600)  # four processes that may compile every kernel of a model
def test_all_parts_run_on_a_cpu(run_bare):
    if reason := toolchain.why_no_compiler():
        pytest.skip(reason)
    done = run_bare("bench/gpu_check.py", "--scale", "tiny", "--parts", "op:silu_and_mul,replay,speed,floor,kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    *table, total, last = done.stdout.splitlines()
    result = json.loads(last)
    rows = result["rows"]
    assert len(table) == len(rows) and result["failed"] == [] and f"{len(rows)} of {len(rows)} rows are right" in total
    assert {row["what"] for row in rows if row["part"] == "op:silu_and_mul"} == {
        "silu_and_mul triton",
        "silu_and_mul torch",
    }
    assert all(row["cases"] >= 3 for row in rows if "cases" in row)
    replays = {row["what"]: row["equal_replays"] for row in rows if "equal_replays" in row}
    # Three steps of each kind of sampling, for a full bucket and for the emptiest that it serves; then, for prompts of
    # such lengths, a piece for each of three layers and one more.
    whole_steps = {"bucket 1": 9, "bucket 2": 9, "bucket 4": 18}
    assert replays == whole_steps | {"pieces of 2 tokens": 4, "pieces of 4 tokens": 8}
    assert [row["what"] for row in rows if row.get("times_as_fast", 0) > 0] == ["1 requests", "3 requests"]
    assert sum(row.get("percent_of_floor", 0) > 0 for row in rows) == 2
    kernels = [row for row in rows if row["part"] == "kernels"]
    assert kernels[0]["what"] == "copy" and all("aim" in row or "library" in row for row in kernels[1:])
    assert any(row["what"].startswith("paged_attention decode") and row["percent_of_copy"] > 0 for row in kernels)
    assert any(row["what"].startswith("linear") and row["percent"] > 0 for row in kernels)


def test_an_unknown_part_is_named(run_bare):
    done = run_bare("bench/gpu_check.py", "--scale", "tiny", "--parts", "replay,op:none")
    assert done.returncode == 2 and "must be some of op:apply_logit_bias, " in done.stderr and "op:none" in done.stderr


ENDINGS = {
    "crash": ("import os; os._exit(3)", "ended with code 3 | a last word"),
    "hang": ("import time; time.sleep(60)", "was still running after 4 s | a last word"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_part_that_does_not_end_well_keeps_its_rows(bench, monkeypatch, tmp_path, ending):
    gpu_check = bench("gpu_check")
    code, problem = ENDINGS[ending]
    script = tmp_path / "part.py"
    script.write_text(
        'import sys\nprint(\'{"what": "first", "ms": 2}\', flush=True)\nprint(\'{"what": "cut\', flush=True)\n'
        f"print('a last word', file=sys.stderr, flush=True)\n{code}\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    monkeypatch.setitem(gpu_check.LIMITS, "op", 4)
    rows = gpu_check.start_part("op:linear", "tiny", time.perf_counter() + 100)
    assert rows == [
        {"part": "op:linear", "what": "first", "ms": 2},
        {"part": "op:linear", "what": "op:linear", "error": problem},
    ]
    [row] = gpu_check.start_part("replay", "tiny", time.perf_counter() - 1)
    assert row["error"] == "no time was left for it"


def test_a_wrong_row_fails_the_run_and_not_the_rows_after_it(bench, monkeypatch, capsys):
    gpu_check = bench("gpu_check")

    def start_part(part, scale, end):
        return [{"part": part, "what": "a", **({"error": "above the band"} if part == "replay" else {"ms": 1})}]

    monkeypatch.setattr(gpu_check, "start_part", start_part)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--scale", "tiny", "--parts", "op:linear,replay,speed"])
    assert gpu_check.main() == 1
    *table, _, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["op:linear", "replay", "speed"]
    assert "WRONG: above the band" in table[1] and json.loads(last)["failed"] == ["replay: a"]


def test_the_longest_parts_fit_into_the_time_of_all(bench):
    gpu_check = bench("gpu_check")
    waves = -(-len(OPS) // gpu_check.OPS_AT_ONCE)
    limits = dict(gpu_check.LIMITS)
    assert waves * limits.pop("op") + sum(limits.values()) <= gpu_check.TOTAL_SECONDS <= 480 - 15


def test_a_wrong_implementation_is_a_row_with_its_case(bench, monkeypatch):
    gpu_parts = bench("gpu_parts")
    op = OPS["silu_and_mul"]
    wrong = dataclasses.replace(op.implementations["torch"], name="wrong", function=lambda x: op.reference(x) + 1)
    kept = {name: op.implementations[name] for name in ("reference", "torch")}
    monkeypatch.setattr(op, "implementations", {"reference": kept["reference"], "wrong": wrong, "torch": kept["torch"]})
    wrong_row, right = gpu_parts.check_op("silu_and_mul", "cpu", seconds=0.01)
    assert "seed 0: AssertionError: silu_and_mul/wrong: out: error" in wrong_row["error"] and wrong_row["cases"] == 0
    assert "error" not in right and right["cases"] >= 3


class _EagerGraphs:
    """A backend without memory of its own, whose graphs run their stages; `wrong` is added to what they return."""

    num_bytes = 0

    def __init__(self, wrong):
        self.wrong = wrong

    def capture(self, name, *stages):
        return [_EagerGraph(stages[: end + 1], self.wrong) for end in range(len(stages))], ()


class _EagerGraph:
    def __init__(self, stages, wrong):
        self.stages, self.wrong = stages, wrong

    def replay(self):
        outputs = ()
        for stage in self.stages:
            outputs = stage(*outputs)
        return tuple(output + self.wrong for output in outputs)


def _replay_rows(gpu_parts, monkeypatch, wrong):
    monkeypatch.setattr(gpu_parts, "graph_backend", lambda platform: _EagerGraphs(wrong))
    monkeypatch.setattr(gpu_parts, "_check_pieces", lambda decoding, sizes: ())  # their results must keep their places
    return list(gpu_parts.check_replays("cpu", gpu_parts.SCALES["tiny"]))[1:]


def test_replays_that_differ_are_rows(bench, monkeypatch):
    gpu_parts = bench("gpu_parts")
    assert all("error" not in row for row in _replay_rows(gpu_parts, monkeypatch, wrong=0))
    rows = _replay_rows(gpu_parts, monkeypatch, wrong=1)
    assert [row["error"].partition(":")[0] for row in rows] == ["graph decode 1", "graph decode 2", "graph decode 4"]


def test_steps_that_run_uncaptured_are_rows(bench, monkeypatch):
    gpu_parts = bench("gpu_parts")
    monkeypatch.setattr(gpu_parts.ModelRunner, "capture_decoding", lambda *arguments: None)
    rows = _replay_rows(gpu_parts, monkeypatch, wrong=0)
    assert [row["error"] for row in rows] == [f"{steps} of {steps} steps ran uncaptured" for steps in (9, 9, 18)]
