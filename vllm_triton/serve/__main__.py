"""`python -m vllm_triton.serve`: every expected failure is one line on stderr and a status other than 0."""

import logging
import sys

from vllm_triton.errors import ConfigError, ModelError
from vllm_triton.serve.arguments import parse_arguments

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """The process's exit status: 0 after a signal ended a server that ran, 130 if it came before."""
    arguments = parse_arguments(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm_triton").setLevel(logging.INFO)
    try:
        # Not at the top, so that --help and a wrong flag answer at once.
        from vllm_triton.serve.launcher import serve
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is missing; install it with: pip install 'vllm_triton[serve]'", file=sys.stderr)
        return 1
    try:
        serve(arguments)
    except (ConfigError, ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
