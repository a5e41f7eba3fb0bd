"""Time of each op on the shapes of real models, for every implementation that runs here, beside the machine's roof.

usage: python bench/ops.py [--op NAME] [--json] [--dtype bfloat16] [--seconds S] [--threads N]

An implementation is timed only where its result is right. GB/s counts the bytes that the op must move at least, so
operands that fit a cache can exceed the roof, which streams from memory. The last line of stdout is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import roof
import torch

from vllm_triton.ops.contract import Dims, Scalar
from vllm_triton.ops.platforms import current_platform, triton_interprets
from vllm_triton.ops.registry import OPS, Op, Situation
from vllm_triton.ops.testing import assert_within_rounding, make_inputs, suite, timing

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> int:
    options = _parser().parse_args()
    if triton_interprets():
        print("bench/ops.py: unset TRITON_INTERPRET: times of Triton's interpreter say nothing", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    device = current_platform().device
    result: dict[str, Any] = {"dtype": options.dtype, "device": device} | roof.measure(device) | roof.describe_machine()
    if not options.json:
        print(f"roof: {result['roof_gb_s']} GB/s, {result['roof_gflop_s']} GFLOP/s on {result['machine']}")
        times = " ".join(f"{name:>10}" for name in ("median", "p20", "p80"))
        print(f"{'op and shape':52} {'implementation':14} {times} {'GB/s':>8} {'GFLOP/s':>9}")
    result["rows"] = []
    for name in options.op or sorted(OPS):
        for row in measure_op(OPS[name], DTYPES[options.dtype], device, options.seconds):
            result["rows"].append(row)
            if not options.json:
                print(_line(row), flush=True)
    print(json.dumps(result))
    return 1 if any("error" in row for row in result["rows"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="may be repeated; default: every op")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each implementation and shape")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    return parser


def measure_op(op: Op, dtype: torch.dtype, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each benchmark shape and implementation; a wrong result is a row with "error" and no times."""
    situation = Situation(device, dtype=dtype)
    for label, dims in op.contract.bench_dims.items():
        for name, implementation in op.implementations.items():
            if implementation.supports(situation) is not None:
                continue
            row = {"op": op.name, "shape": label, "implementation": name}
            error = wrong_result(op, name, dims, dtype, device)
            yield row | ({"error": error} if error else _times(op, name, dims, dtype, device, seconds))


def wrong_result(op: Op, implementation: str, dims: Dims, dtype: torch.dtype, device: str) -> str | None:
    """Why this implementation's result is not within rounding of the float64 reference, or None."""
    inputs = _inputs(op, dims, dtype, device)
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    exact = suite.run(op, op.reference, suite.widened(inputs))
    eager = suite.run(op, op.reference, copies)
    actual = suite.run(op, op.implementations[implementation], inputs)
    try:
        for name, value in actual.items():
            assert_within_rounding(value, exact[name], eager[name], what=name)
    except AssertionError as error:
        return str(error)
    return None


def _inputs(op: Op, dims: Dims, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Of the usual kind, where tests draw the kind as well and the shape does not say it."""
    inputs = make_inputs(op.contract, dims, dtype, device=device)
    numbers = {name: arg for name, arg in op.contract.args.items() if isinstance(arg, Scalar) and not arg.size}
    return inputs | {name: arg.example for name, arg in numbers.items() if arg.type is not torch.dtype}


def _times(op: Op, implementation: str, dims: Dims, dtype: torch.dtype, device: str, seconds: float) -> dict[str, Any]:
    arguments = tuple(_inputs(op, dims, dtype, device).values())
    function = op.implementations[implementation].function
    with torch.inference_mode():
        taken = timing.measure(lambda: function(*arguments), device, seconds)
    return {
        "median_us": round(taken.median * 1e6, 2),
        "p20_us": round(taken.p20 * 1e6, 2),
        "p80_us": round(taken.p80 * 1e6, 2),
        "calls": taken.calls,
        "gb_s": round(op.contract.bytes_moved(arguments) / taken.median / 1e9, 2),
        "gflop_s": round(op.contract.flops(dims) / taken.median / 1e9, 2),
    }


def _line(row: dict[str, Any]) -> str:
    head = f"{row['op'] + ': ' + row['shape']:52} {row['implementation']:14}"
    if "error" in row:
        return f"{head} WRONG: {row['error']}"
    times = " ".join(f"{row[key]:>8.1f}us" for key in ("median_us", "p20_us", "p80_us"))
    return f"{head} {times} {row['gb_s']:>8.1f} {row['gflop_s']:>9.1f}"


if __name__ == "__main__":
    sys.exit(main())
