"""How the engine scales: cost per token along one request, and the scheduler's time with the requests that run.

usage: python bench/scaling.py [--model PATH] [--tokens N] [--output STEM]
    --model    a Hugging Face folder; by default the demo model in bfloat16
    --tokens   length that one request grows to, default 8192; at most the model's context
    --output   writes STEM.json and STEM.png, default bench/results/scaling

Two promises are measured:
    A token costs the same anywhere in a text, attention apart. One request grows to --tokens; at each length the
    attention of all layers alone, captured as the engine captures it, is taken off the median step around it.
    The scheduler's time per step grows at most linearly with the requests that run, 1 to 1024 of them.
The last line of stdout is the JSON object that is written. Drawing needs matplotlib: pip install 'vllm_triton[bench]'.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import breakdown
import engine
import roof
import scheduler
import workloads as w

PROMPT_TOKENS = 128
FIRST_LENGTH = 1024
WINDOW = 256  # steps around a length, of which the median counts
RUNNING_REQUESTS = [2**power for power in range(11)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "scaling"))
    args = parser.parse_args()
    if args.tokens < 2 * FIRST_LENGTH:
        parser.error(f"--tokens must be at least {2 * FIRST_LENGTH}, got {args.tokens}")
    require_matplotlib()
    result = roof.describe_machine() | {
        "tokens": measure_tokens(args.model or engine.demo_in_bfloat16(), args.tokens),
        "scheduler": measure_scheduler(RUNNING_REQUESTS),
    }
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, output.with_suffix(".png"))
    print(json.dumps(result))


def measure_tokens(model: str, num_tokens: int) -> dict[str, Any]:
    """Milliseconds of a step at each length, of attention, and of the rest; and by how much the rest grows."""
    from vllm_triton import LLM

    num_blocks = 1 + math.ceil(num_tokens / w.BLOCK_SIZE)
    llm = LLM(model, dtype=engine.DTYPE, max_model_len=num_tokens, num_kv_blocks=num_blocks, block_size=w.BLOCK_SIZE)
    with breakdown.step_times(llm) as clock:
        w.generate(llm, w.random_prompts(1, PROMPT_TOKENS), num_tokens - PROMPT_TOKENS)
    steps = clock.steps[1:]  # the first one reads the prompt; the others' lengths are one apart
    lengths = [PROMPT_TOKENS + 1 + index for index in range(len(steps))]
    last = num_tokens - WINDOW // 2
    points = [min(length, last) for length in range(FIRST_LENGTH, num_tokens + 1, FIRST_LENGTH)]
    step_ms = around(points, lengths, [1000 * step.seconds for step in steps])
    python_ms = around(points, lengths, [1000 * step.python_seconds for step in steps])
    attention_ms = [1000 * seconds for seconds in measure_attention(llm, points)]
    rest_ms = [step - attention for step, attention in zip(step_ms, attention_ms, strict=True)]
    figures = {"step_ms": step_ms, "attention_ms": attention_ms, "rest_ms": rest_ms, "python_ms": python_ms}
    return {
        "model": Path(model).name,
        "dtype": engine.DTYPE,
        "length": points,
        **{name: [round(value, 3) for value in values] for name, values in figures.items()},
        "rest_growth": round(growth(points, rest_ms), 3),
        "python_growth": round(growth(points, python_ms), 3),
    }


def around(points: Sequence[int], lengths: Sequence[int], values: Sequence[float]) -> list[float]:
    """For each point the median value of the lengths at most half a WINDOW away."""
    return [
        statistics.median(
            value for length, value in zip(lengths, values, strict=True) if abs(length - point) <= WINDOW // 2
        )
        for point in points
    ]


def growth(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The last value over the first one, both on the straight line through all: 1 for what is flat."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return (slope * xs[-1] + intercept) / (slope * xs[0] + intercept)


def measure_attention(llm: Any, lengths: Sequence[int]) -> list[float]:
    """Median seconds of one token's attention in all layers, for each length of its sequence.

    Over the engine's own caches, from a graph as in its steps. Before each replay as much memory is read as the weights
    take: in a step they push the keys and values out of the processor's caches.
    """
    import torch

    from vllm_triton import ops
    from vllm_triton.compile.graphs.recording import CpuGraphs

    runner = llm.core.runner
    attention = [layer.self_attn for layer in runner.model.layers]
    dtype = runner.kv_caches[0][0].dtype
    weights = torch.ones(sum(weight.nbytes for weight in runner.model.parameters()) // 4)
    query = torch.randn(1, attention[0].num_heads, attention[0].head_size).to(dtype)
    out = torch.empty_like(query)
    block_table = torch.arange(1, runner.batch.max_blocks + 1, dtype=torch.int32)[None]
    seq_lens = torch.ones(1, dtype=torch.int32)
    query_start_loc = torch.tensor([0, 1], dtype=torch.int32)

    def attend() -> tuple[torch.Tensor, ...]:
        for layer, (keys, values) in zip(attention, runner.kv_caches, strict=True):
            ops.paged_attention(
                out, query, keys, values, block_table, seq_lens, query_start_loc, layer.scale, layer.window
            )
        return ()

    with torch.inference_mode():
        [graph] = CpuGraphs().capture("attention", attend)
        medians = []
        for length in lengths:
            seq_lens.fill_(length)
            medians.append(median_after(weights.sum, graph.replay))
    return medians


def median_after(before: Callable[[], Any], work: Callable[[], Any], count: int = 25) -> float:
    """Median seconds of the work, each time right after what comes before it."""
    seconds = []
    for _ in range(count):
        before()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


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
    left.set_title(f"One request, {tokens['model']}, {tokens['dtype']}: the rest grows x {tokens['rest_growth']:.2f}")
    for name in ("schedule", "update"):
        right.plot(running["requests"], running[f"{name}_us"], marker="o", label=name)
    linear = [running["schedule_us"][-1] * count / running["requests"][-1] for count in running["requests"]]
    right.plot(running["requests"], linear, linestyle=":", color="grey", label="linear")
    right.set(xlabel="running requests", ylabel="us per step", xscale="log", yscale="log")
    right.set_title(f"Scheduler: time ~ requests ^ {running['exponent']:.2f}")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['machine']}, {result['threads']} threads, commit {result['commit']}", fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
