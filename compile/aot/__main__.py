"""`python -m vllm_triton.compile.aot [--target cuda:90] [--json]`: compiles every kernel; exit code 1 if one fails."""

import argparse
import dataclasses
import json
import sys

from vllm_triton.compile.aot.compile import TARGETS, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_triton.compile.aot", description=__doc__)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="may be repeated; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    arguments = parser.parse_args()
    rows = report(arguments.target or list(TARGETS))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        for row in rows:
            outcome = row.error or f"{row.binary_bytes} bytes, {row.shared_bytes} bytes shared"
            print(f"{row.target:11} {row.op}/{row.implementation} {row.kernel}[{row.case}]: {outcome}")
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
