"""`python -m vllm_triton.kernels`: which implementation each op runs here, why, and why not the others."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from vllm_triton import envs, ops  # noqa: F401  (importing ops fills the registry)
from vllm_triton.ops.errors import RegistryError
from vllm_triton.ops.platforms import current_platform
from vllm_triton.ops.registry import Situation, explain, parse_choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or with --json {"ops": [{"op", "chosen", "why", "implementations": [...]}]}.

    Returns: the exit code: 0, or 2 after one line on stderr where a choice is unknown or cannot run here.
    """
    parser = argparse.ArgumentParser(prog="python -m vllm_triton.kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--kernels",
        default=envs.kernels(),
        metavar="OP=IMPLEMENTATION,...",
        help="choices to explain; default: VLLM_TRITON_KERNELS",
    )
    options = parser.parse_args(arguments)
    platform = current_platform()
    situation = Situation(platform.device, dtype=platform.default_dtype)
    try:
        rows = explain(parse_choices(options.kernels), situation, platform)
    except RegistryError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"ops": rows}, indent=2) if options.json else table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of `explain` as text: a line for each op, and one below it for each rejected implementation."""
    lines = []
    width = max(len(row["op"]) for row in rows)
    for row in rows:
        lines.append(f"{row['op']:{width}}  {row['chosen']} ({row['why']})")
        for implementation in row["implementations"]:
            if implementation["rejected_because"] is not None:
                lines.append(f"{'':{width}}    not {implementation['name']}: {implementation['rejected_because']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
