"""The flags of `python -m vllm_triton.serve`, named as vLLM names them. Imports nothing heavy: --help is quick."""

import argparse
import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm_triton.config import COMPILE_BACKENDS, CUDAGRAPH_MODES, QUANTIZATIONS

# Flags that are fields of EngineConfig, by the same name; only those that were given reach it.
ENGINE_FIELDS = (
    "model",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_config",
    "max_model_len",
    "num_kv_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "seed",
    "kernels",
    "optimization_level",
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "compile_backend",
    "compile_ranges",
    "compile_sizes",
    "load_format",
)


@dataclass
class ServeArguments:
    """engine: the settings of EngineConfig that were given, and no others."""

    host: str
    port: int
    api_key: str | None
    served_model_names: list[str] | None
    engine: dict[str, Any] = field(default_factory=dict)


def parse_arguments(argv: list[str] | None = None) -> ServeArguments:
    """A wrong flag or value ends the process: one line on stderr, status 2."""
    values = vars(_build_parser().parse_args(argv))
    return ServeArguments(
        host=values["host"],
        port=values["port"],
        api_key=values["api_key"],
        served_model_names=values["served_model_name"],
        engine={name: values[name] for name in ENGINE_FIELDS if name in values},
    )


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, and lists the flags there are when one is unknown."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            flags = [action.option_strings[0] for action in self._actions]
            message += f"; the flags are {' '.join(sorted(flags))}"
        self.exit(2, f"{self.prog}: error: {message}\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m vllm_triton.serve",
        description="Serve a language model over HTTP with OpenAI's API, and a chat page at /.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    server.add_argument(
        "--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)"
    )
    server.add_argument(
        "--api-key", type=_api_key, default=None, help="key that clients must send to /v1/*, /tokenize, /detokenize"
    )
    server.add_argument(
        "--served-model-name",
        nargs="+",
        type=_non_empty,
        default=None,
        metavar="NAME",
        help="what clients call the model; answers use the first name",
    )

    model = parser.add_argument_group("model")
    model.add_argument("--model", type=_non_empty, metavar="PATH", help="model to serve (default: the demo model)")
    model.add_argument("--dtype", help="type of weights and activations")
    model.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        metavar="NAME",
        help=f"how weights are held: {', '.join(QUANTIZATIONS)} (default: auto, as the checkpoint has them)",
    )
    model.add_argument(
        "--quantization-config",
        type=_json_object,
        metavar="JSON",
        help='layer by layer: {"linear": NAME, "moe": NAME, "ignore": [LAYER, ...], "targets": {LAYER: NAME}}, where '
        "a layer is a name, re:REGEX or a glob",
    )
    model.add_argument("--load-format", help="format of the weights")
    model.add_argument("--max-model-len", type=_positive, metavar="TOKENS", help="prompt and answer together, at most")
    model.add_argument("--seed", type=int, help="seed of the draws of requests without a seed of their own")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--kv-cache-dtype", help="type of keys and values in the cache: auto or fp8")
    engine.add_argument("--num-kv-blocks", type=_positive, metavar="BLOCKS", help="blocks of the KV cache")
    engine.add_argument("--block-size", type=_positive, metavar="TOKENS", help="tokens in one block of the KV cache")
    engine.add_argument("--max-num-seqs", type=_positive, metavar="N", help="sequences computed together, at most")
    engine.add_argument(
        "--max-num-batched-tokens", type=_positive, metavar="TOKENS", help="tokens computed in one step, at most"
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse the KV cache of prompts that start alike",
    )
    engine.add_argument(
        "--kernels",
        type=_kernels,
        metavar="OP=IMPL,...",
        help="implementation of single ops; `python -m vllm_triton.kernels` lists them",
    )
    engine.add_argument(
        "-O",
        "--optimization-level",
        type=int,
        choices=range(4),
        help="0 eager; 1 compiled pieces; 2 (default) and 3 also whole graphs for decoding",
    )
    engine.add_argument(
        "--cudagraph-mode",
        choices=CUDAGRAPH_MODES,
        help="which graphs are captured, on any device; wins over -O",
    )
    engine.add_argument(
        "--capture-sizes",
        "--cudagraph-capture-sizes",
        dest="cudagraph_capture_sizes",
        type=_sizes,
        metavar="N,...",
        help="numbers of tokens to capture steps for (default: 1, 2, 4 and multiples of 8 up to --max-num-seqs or 512)",
    )
    engine.add_argument(
        "--compile-backend",
        choices=COMPILE_BACKENDS,
        help="what runs the pieces of the model: one kernel an op, or what torch's inductor makes of them",
    )
    engine.add_argument(
        "--compile-ranges",
        type=_sizes,
        metavar="N,...",
        help="last numbers of tokens of the ranges that pieces are compiled for (default: one range)",
    )
    engine.add_argument(
        "--compile-sizes", type=_sizes, metavar="N,...", help="exact numbers of tokens that pieces are compiled for"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return value


def _sizes(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


def _non_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _api_key(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("must be valid UTF-8") from error
    return _non_empty(text)


def _kernels(text: str) -> dict[str, str]:
    choices: dict[str, str] = {}
    for pair in text.split(","):
        op, _, implementation = (part.strip() for part in pair.partition("="))
        if not op or not implementation or op in choices:
            raise argparse.ArgumentTypeError(f"must look like OP=IMPL,OP=IMPL with each op once, got {text!r}")
        choices[op] = implementation
    return choices


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON ({error}), got {text!r}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
