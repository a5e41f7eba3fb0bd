"""How the engine scales: cost per token along one request, and the scheduler's time with the requests that run.

usage: python bench/scaling.py [--model PATH] [--tokens N] [--repeats N] [--output STEM]
    --model    a Hugging Face folder; by default the demo model in bfloat16
    --tokens   length that one request grows to, default 8192; at most the model's context
    --repeats  runs of that request, default 3
    --output   writes STEM.json and STEM.png, default bench/results/scaling

Two promises are measured:
    A token costs the same anywhere in a text, attention apart. One request grows to --tokens; every few
    steps the attention of all layers alone, captured as the engine captures it, is timed and taken off them.
    The scheduler's time per step grows at most linearly with the requests that run, 1 to 1024 of them.
The last line of stdout is the JSON object that is written. Drawing needs matplotlib: pip install 'vllm_triton[bench]'.
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import breakdown
import engine
import numpy as np
import roof
import scheduler
import workloads as w

PROMPT_TOKENS = 128
EACH_LENGTH = 1024
SAMPLED_STEPS = 16
RUNNING_REQUESTS = [2**power for power in range(11)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "scaling"))
    args = parser.parse_args()
    if args.tokens < 2 * EACH_LENGTH:
        parser.error(f"--tokens must be at least {2 * EACH_LENGTH}, got {args.tokens}")
    require_matplotlib()
    result = roof.describe_machine() | {
        "tokens": measure_tokens(args.model or engine.demo_in_bfloat16(), args.tokens, args.repeats),
        "scheduler": measure_scheduler(RUNNING_REQUESTS),
    }
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, output.with_suffix(".png"))
    print(json.dumps(result))


def measure_tokens(model: str, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step around each length, of attention, and of the rest; and by how much the rest grows."""
    from vllm_triton import LLM

    num_blocks = 1 + math.ceil(num_tokens / w.BLOCK_SIZE)
    llm = LLM(model, dtype=engine.DTYPE, max_model_len=num_tokens, num_kv_blocks=num_blocks, block_size=w.BLOCK_SIZE)
    attention = AttentionAlone(llm)
    runs = [measure_run(llm, attention, num_tokens) for _ in range(repeats)]
    points = at_lengths(list(itertools.chain(*runs)), num_tokens)
    lengths = [round(point.length) for point in points]
    names = ("step_ms", "attention_ms", "rest_ms", "python_ms")
    return {
        "model": Path(model).name,
        "dtype": engine.DTYPE,
        "runs": repeats,
        "length": lengths,
        **{name: [round(getattr(point, name), 3) for point in points] for name in names},
        "rest_growth": round(growth(lengths, [point.rest_ms for point in points]), 3),
        "python_growth": round(growth(lengths, [point.python_ms for point in points]), 3),
    }


@dataclass(frozen=True)
class Point:
    """Milliseconds at one length of the sequence: of a step, of its attention, and of what is no replay."""

    length: int
    step_ms: float
    attention_ms: float
    python_ms: float

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.attention_ms


def measure_run(llm: Any, attention: Callable[[int], float], num_tokens: int) -> list[Point]:
    """Lets one request grow; after every SAMPLED_STEPS steps times attention, while the machine is as it was."""
    points: list[Point] = []
    with breakdown.step_times(llm) as clock:
        timed, length = llm.core.step, itertools.count(PROMPT_TOKENS)

        def step() -> Any:
            current = next(length)
            if current > PROMPT_TOKENS and current % SAMPLED_STEPS == 0:
                clock.start_step()  # so that no step of the engine counts what follows
                steps = [one for one in clock.steps if one.num_outputs]
                clock.steps.clear()
                points.append(
                    Point(
                        length=current - SAMPLED_STEPS // 2,
                        step_ms=1000 * statistics.median(one.seconds for one in steps),
                        attention_ms=1000 * attention(current),
                        python_ms=1000 * statistics.median(one.python_seconds for one in steps),
                    )
                )
            return timed()

        with mock.patch.object(llm.core, "step", step):
            w.generate(llm, w.random_prompts(1, PROMPT_TOKENS), num_tokens - PROMPT_TOKENS)
    return points


def at_lengths(points: Sequence[Point], num_tokens: int) -> list[Point]:
    """For each multiple of EACH_LENGTH medians of the points around it, at most half that far away.

    The fifth of them counts whose steps were fastest: others on the machine only add to a step's time.
    """
    found = []
    for length in range(EACH_LENGTH, num_tokens + 1, EACH_LENGTH):
        near = [point for point in points if abs(point.length - length) <= EACH_LENGTH // 2]
        fastest = sorted(near, key=lambda point: point.step_ms)[: max(len(near) // 5, 1)]
        fields = zip(*map(dataclasses.astuple, fastest), strict=True)
        found.append(Point(*map(statistics.median, fields)))
    return found


def growth(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The last value over the first one, both on the straight line through all: 1 for what is flat."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return (slope * xs[-1] + intercept) / (slope * xs[0] + intercept)


class AttentionAlone:
    """Seconds of one token's attention in all layers, over the engine's own caches, from a graph as in its steps."""

    def __init__(self, llm: Any):
        import torch

        from vllm_triton import ops
        from vllm_triton.compile.graphs.recording import CpuGraphs

        runner = llm.core.runner
        layers = [layer.self_attn for layer in runner.model.layers]
        query = torch.randn(1, layers[0].num_heads, layers[0].head_size).to(runner.kv_caches[0][0].dtype)
        out = torch.empty_like(query)
        block_table = torch.arange(1, runner.batch.max_blocks + 1, dtype=torch.int32)[None]
        query_start_loc = torch.tensor([0, 1], dtype=torch.int32)
        self._seq_lens = torch.ones(1, dtype=torch.int32)
        # In a step the weights push keys and values out of the processor's caches: as many bytes are read here, and by
        # NumPy, since torch's threads would go on to spin for a while beside those of the graph.
        self._as_weights = np.ones(sum(weight.nbytes for weight in runner.model.parameters()) // 4, np.float32)
        self._operands = (query, out, block_table, query_start_loc)  # whose addresses the graph holds

        def attend() -> tuple[torch.Tensor, ...]:
            for layer, (keys, values) in zip(layers, runner.kv_caches, strict=True):
                tables = (block_table, self._seq_lens, query_start_loc)
                ops.paged_attention(out, query, keys, values, *tables, layer.scale, layer.window, layer.softcap)
            return ()

        with torch.inference_mode():
            [self._graph], _ = CpuGraphs().capture("attention", attend)

    def __call__(self, length: int) -> float:
        self._seq_lens.fill_(length)
        self._as_weights.sum()
        start = time.perf_counter()
        self._graph.replay()
        return time.perf_counter() - start


def measure_scheduler(running: Sequence[int]) -> dict[str, Any]:
    """Microseconds of schedule() and update_from_output() for so many requests that decode; the larger half's slope.

    exponent: p of time ~ requests ** p; at most linear means about 1 and less.
    """
    times: dict[str, list[float]] = {"schedule_us": [], "update_us": []}
    for num_requests in running:
        for name, seconds in zip(times, scheduler.measure(num_requests), strict=True):
            times[name].append(round(1e6 * statistics.median(block_means(seconds)), 2))
    total = [sum(pair) for pair in zip(*times.values(), strict=True)]
    half = len(running) // 2
    return {"requests": list(running), **times, "exponent": round(exponent(running[half:], total[half:]), 3)}


def block_means(seconds: Sequence[float]) -> list[float]:
    """Means over as many steps as a block has tokens. Each request fills one block in them, which is the dear step of
    all: few requests fill theirs together and the median step shows none of it, of many some do in every step."""
    size = w.BLOCK_SIZE
    return [statistics.fmean(seconds[start : start + size]) for start in range(0, len(seconds) - size + 1, size)]


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """p of y ~ x ** p, by the straight line through the logarithms."""
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def require_matplotlib() -> None:
    """Raises: SystemExit where there is none, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SystemExit("bench/scaling.py draws with matplotlib: pip install 'vllm_triton[bench]'") from None


def draw(result: dict[str, Any], path: Path) -> None:
    """Both measurements, side by side, as a PNG picture."""
    from matplotlib.figure import Figure

    tokens, running = result["tokens"], result["scheduler"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("step", "attention", "rest", "python"):
        left.plot(tokens["length"], tokens[f"{name}_ms"], marker="o", label=name)
    left.set(xlabel="tokens of the sequence", ylabel="ms per token", ylim=(0, None))
    left.set_title(f"One request: the rest ends at {tokens['rest_growth']:.2f} times its beginning")
    for name in ("schedule", "update"):
        right.plot(running["requests"], running[f"{name}_us"], marker="o", label=name)
    linear = [running["schedule_us"][-1] * count / running["requests"][-1] for count in running["requests"]]
    right.plot(running["requests"], linear, linestyle=":", color="grey", label="linear")
    right.set(xlabel="running requests", ylabel="us per step", xscale="log", yscale="log")
    right.set_title(f"Scheduler: time ~ requests ^ {running['exponent']:.2f}")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    where = f"{result['machine']}, {result['threads']} threads, commit {result['commit']}"
    figure.suptitle(f"{tokens['model']}, {tokens['dtype']}, {where}", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
