"""What a GPU alone can show, within 8 minutes: are the kernels right, do graphs replay what they captured, how fast.

usage: PYTHONPATH=. python bench/gpu_check.py [--parts NAME,...] [--scale tiny]
    --parts  some of op:NAME, replay, speed, floor, kernels; default: all
    --scale  "tiny" is for a test of this script, which runs it on a CPU as well; its figures say nothing

    op:NAME  every kernel of the op against its reference
    replay   every decode bucket captured, its replays equal to the same step uncaptured, bit by bit
    speed    a decode step of a 135M model, eager (-O0) and captured (-O2)
    floor    a decode step of Llama-3-8B's shape beside the time that reading its weights and KV cache takes alone
    kernels  single kernels beside a copy's bandwidth and torch's own products, and what is aimed at

Needs torch, triton and numpy; weights are random. Each part runs in a process of its own and has a limit: one that
fails, hangs or breaks the GPU's context is a row of the table. The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

# Seconds for all parts together; the rest of the 8 minutes is for starting and for what comes late.
TOTAL_SECONDS = 460
# The time of an op's checks goes into compiling, which one process does for one kernel at a time.
OPS_AT_ONCE = 16
# Seconds of each part.
LIMITS = {"op": 60, "replay": 75, "speed": 75, "floor": 130, "kernels": 60}

Row = dict[str, Any]  # "part" and "what", then figures, or "error"


def main() -> int:
    options = _parser().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and options.scale != "tiny":
        print("gpu_check.py: torch sees no GPU here, so there is nothing to check")
        return 0
    if options.inside:
        _run_part(options.inside, options.scale, device)
        return 0
    known = _all_parts()
    parts = options.parts.split(",") if options.parts else known
    unknown = [part for part in parts if part not in known]
    if unknown:
        print(f"gpu_check.py: --parts must be some of {', '.join(known)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    rows = []
    for row in _run_all(parts, options.scale, start + TOTAL_SECONDS):
        print(_line(row), flush=True)
        rows.append(row)
    failed = [f"{row['part']}: {row['what']}" for row in rows if "error" in row]
    result = _describe_machine(device) | {"scale": options.scale, "seconds": round(time.perf_counter() - start, 1)}
    print(f"{len(rows) - len(failed)} of {len(rows)} rows are right, {result['seconds']} s on {result['device']}")
    print(json.dumps(result | {"failed": failed, "rows": rows}))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="")
    parser.add_argument("--scale", choices=["gpu", "tiny"], default="gpu")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # runs this part here
    return parser


def _describe_machine(device: str) -> dict[str, Any]:
    import roof

    name = "a CPU"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return {"device": name} | roof.describe_machine()


def _run_all(parts: list[str], scale: str, end: float) -> Iterator[Row]:
    """Rows of all parts, in order; several ops at once, and nothing beside what is timed."""
    ops = [part for part in parts if part.startswith("op:")]
    with ThreadPoolExecutor(OPS_AT_ONCE) as pool:
        for rows in pool.map(lambda part: start_part(part, scale, end), ops):
            yield from rows
    for part in parts:
        if part not in ops:
            yield from start_part(part, scale, end)


def _all_parts() -> list[str]:
    import vllm_triton.ops  # noqa: F401  (fills the registry)
    from vllm_triton.ops.registry import OPS

    return [*(f"op:{name}" for name in sorted(OPS)), "replay", "speed", "floor", "kernels"]


def start_part(part: str, scale: str, end: float) -> list[Row]:
    """Runs a part in a process of its own; its rows, of which the last may say that it did not end well.

    Args: end: when it must be over, by the clock of perf_counter.
    """
    limit = min(LIMITS[part.partition(":")[0]], end - time.perf_counter())
    if limit <= 0:
        return [{"part": part, "what": part, "error": "no time was left for it"}]
    command = [sys.executable, __file__, "--inside", part, "--scale", scale]
    environment = dict(os.environ)
    if part.startswith("op:"):  # the references of several ops share the processor
        environment["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // OPS_AT_ONCE, 1))
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, env=environment)
        stdout, stderr = done.stdout, done.stderr
        problem = f"ended with code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        stdout, stderr, problem = error.stdout, error.stderr, f"was still running after {limit:.0f} s"
    lines = (stdout or b"").decode(errors="replace").splitlines()
    rows = [{"part": part} | json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    if problem:
        last = (stderr or b"").decode(errors="replace").strip().splitlines()[-3:]
        rows.append({"part": part, "what": part, "error": " | ".join([problem, *last])})
    return rows


def _run_part(part: str, scale_name: str, device: str) -> None:
    """Prints the part's rows, each as one line of JSON."""
    import gpu_parts

    scale = gpu_parts.SCALES[scale_name]
    run = {
        "replay": gpu_parts.check_replays,
        "speed": gpu_parts.compare_levels,
        "floor": gpu_parts.compare_with_floor,
        "kernels": gpu_parts.compare_kernels,
    }
    name, _, op = part.partition(":")
    try:
        rows = gpu_parts.check_op(op, device, scale.op_seconds) if name == "op" else run[name](device, scale)
        for row in rows:
            print(json.dumps(row), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"what": part, "error": f"{type(error).__name__}: {error}"}), flush=True)


def _line(row: Row) -> str:
    head = f"{row['part']:24} {row['what']:32}"
    figures = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("part", "what", "error"))
    return f"{head} WRONG: {row['error']}" if "error" in row else f"{head} {figures}"


if __name__ == "__main__":
    sys.exit(main())
