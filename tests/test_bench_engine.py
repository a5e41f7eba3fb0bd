"""The engine's benchmarks: what they compute from times, and that they still find what they time."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import make_tiny

from vllm_triton import LLM

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def bench():
    """The benchmarks by name; they import one another from their folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        before = set(sys.modules)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in ("breakdown", "scaling", "roof")})
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCH:
                del sys.modules[name]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_part_counts_without_those_within_it(bench):
    now = Clock()
    clock = bench.breakdown.StepClock(now)

    def spend(seconds: float) -> None:
        now.now += seconds

    def outer() -> None:
        spend(2)
        clock.timed("inner", spend)(3)
        clock.timed("inner", spend)(4)

    def step() -> SimpleNamespace:
        spend(1)
        clock.timed("outer", outer)()
        return SimpleNamespace(outputs=["a", "b"])

    clock.stepping(step)()
    clock.timed("replay", spend)(20)
    spend(5)
    assert clock.steps == []  # the first one ends with the second one's start
    clock.start_step()
    [found] = clock.steps
    assert (found.seconds, found.parts) == (35, {"outer": 2, "inner": 7, "replay": 20})
    assert (found.rest_seconds, found.python_seconds, found.num_calls, found.num_outputs) == (6, 15, 4, 2)


def test_a_call_that_raises_is_counted_too(bench):
    now = Clock()
    clock = bench.breakdown.StepClock(now)

    def fail() -> None:
        now.now += 3
        raise KeyError("no")

    clock.start_step()
    with pytest.raises(KeyError):
        clock.timed("failing", fail)()
    clock.start_step()
    assert clock.steps[0].parts == {"failing": 3} and clock.steps[0].rest_seconds == 0


def _steps(bench, count: int, num_outputs: int = 1, replay: float = 0.009):
    return [bench.breakdown.Step(0.010, {"replay": replay, "inputs": 0.0004}, 2, num_outputs) for _ in range(count)]


def test_steps_that_replay_for_all_requests_count(bench):
    prefill = [bench.breakdown.Step(0.5, {"inputs": 0.1}, 2, 1)]
    fewer = _steps(bench, 3, num_outputs=2)
    decoding = _steps(bench, 9)
    warmup = bench.breakdown.NUM_WARMUP_STEPS
    assert bench.breakdown.decode_steps(prefill + decoding + fewer, 1) == decoding[warmup:]
    with pytest.raises(SystemExit, match="3 steps replayed a graph for 2 requests"):
        bench.breakdown.decode_steps(prefill + decoding + fewer, 2)


def test_the_table_adds_up_and_names_a_limit_that_is_broken(bench):
    figures = bench.breakdown.summarise(_steps(bench, 5))
    assert figures["step_ms"] == 10 and figures["python_ms"] == 1 and figures["steps"] == 5
    assert sum(figures["parts_ms"].values()) == pytest.approx(figures["step_ms"])
    assert list(figures["parts_ms"]) == list(bench.breakdown.PARTS)
    text = bench.breakdown.table(1, figures)
    assert text[-1].split() == ["python", "1.000", "ms", "10.0", "%", "OVER", "the", "limit", "of", "0.4", "ms"]
    within = bench.breakdown.table(64, figures)
    assert within[-1].endswith("within the limit of 3.0 ms")
    assert "limit" not in "".join(bench.breakdown.table(2, figures))


def test_timing_a_call_costs_little(bench):
    assert 0 < bench.breakdown.call_overhead(2000) < 20e-6


def test_the_engine_has_every_part_that_is_timed_and_is_left_as_it_was(bench, tmp_path):
    make_tiny("llama3", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64, max_num_seqs=4)
    from vllm_triton.compile.graphs.recording import CpuGraph

    replay = CpuGraph.replay
    with bench.breakdown.step_times(llm) as clock:
        bench.scaling.w.generate(llm, [[3, 4, 5], [6, 7]], 4)
    assert CpuGraph.replay is replay and "step" not in vars(llm.core) and "execute" not in vars(llm.core.runner)
    assert [step.num_outputs for step in clock.steps] == [2, 2, 2]  # and a fourth, which nothing ended
    timed = set(bench.breakdown.PARTS) - {"rest", "replay"}  # the interpreter captures nothing
    assert all(set(step.parts) == timed and step.rest_seconds > 0 for step in clock.steps)


def test_growth_is_that_of_the_line(bench):
    assert bench.scaling.growth([1, 2, 3], [5, 5, 5]) == 1
    assert bench.scaling.growth([1, 2, 3], [1, 2, 3]) == pytest.approx(3)


def test_exponent_of_powers(bench):
    xs = [1, 2, 4, 8]
    assert bench.scaling.exponent(xs, [3 * x**1.5 for x in xs]) == pytest.approx(1.5)


def test_points_are_those_around_a_length_that_were_fastest(bench):
    point, each = bench.scaling.Point, bench.scaling.EACH_LENGTH

    def around(length: int, step_ms: float) -> list:
        quick = [point(length + offset, step_ms, 1.0, 0.5) for offset in (-32, 0, 32)]
        return quick + [point(length + offset, 3 * step_ms, 2.0, 0.9) for offset in range(-256, 256, 40)]

    first, second = bench.scaling.at_lengths(around(each, 5.0) + around(2 * each, 6.0), 2 * each)
    assert first == point(each, 5.0, 1.0, 0.5) and first.rest_ms == 4
    assert second == point(2 * each, 6.0, 1.0, 0.5) and second.rest_ms == 5


def test_a_block_of_steps_shows_what_one_of_them_costs(bench):
    size = bench.scaling.w.BLOCK_SIZE
    seconds = ([0.0] * (size - 1) + [float(size)]) * 3
    assert bench.scaling.block_means([*seconds, 99.0]) == [1, 1, 1]


def test_resident_memory_is_that_of_this_process():
    # In a process of its own: a collection of what earlier tests left would free more than is taken here.
    script = """
from roof import resident_bytes
before = resident_bytes()
block = b"1" * (256 * 2**20)
print((resident_bytes() - before) / len(block))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, check=True)
    assert 0.9 < float(run.stdout) < 1.5


def test_the_picture_needs_matplotlib_and_says_so_first(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--output", str(tmp_path / "scaling")])
    with pytest.raises(SystemExit, match=r"pip install 'vllm_triton\[bench\]'"):
        bench.scaling.main()


def test_the_committed_figures_name_their_machine_and_commit():
    figures = json.loads((BENCH / "results" / "scaling.json").read_text())
    assert {"machine", "threads", "commit", "torch", "triton", "python"} <= set(figures)
    assert not figures["commit"].endswith("dirty")
    assert (BENCH / "results" / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_drawn(bench, tmp_path):
    figures = json.loads((BENCH / "results" / "scaling.json").read_text())
    bench.scaling.draw(figures, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_fewer_tokens_than_show_anything_are_refused():
    command = [sys.executable, str(BENCH / "scaling.py"), "--tokens", "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--tokens must be at least 2048, got 100" in done.stderr
