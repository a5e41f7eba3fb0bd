"""From a forward to a program: from the cache where it is known, else traced, written, compiled and kept."""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_triton.compile.cache import CompileCache
from vllm_triton.compile.pieces.compilers import PieceCompiler, Runnable
from vllm_triton.compile.pieces.program import Program
from vllm_triton.compile.pieces.ranges import CompileRange, Ranged
from vllm_triton.compile.pieces.source import Call, ForwardSource, Function, TensorSpec, write_source
from vllm_triton.compile.pieces.trace import InputSpec, trace

logger = logging.getLogger(__name__)

_SOURCE, _LAYOUT = "forward.py", "forward.json"


@dataclass(frozen=True)
class Recipe:
    """What a program is made of.

    Args:
        forward: (inputs by name, constants by name) -> hidden states.
        inputs: what differs from step to step.
        constants: weights and KV caches.
        compiler: for the pieces.
        ranges: numbers of tokens that they are compiled for.
    """

    forward: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], torch.Tensor]
    inputs: Mapping[str, InputSpec]
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    compiler: PieceCompiler
    ranges: Sequence[CompileRange]


def build_program(recipe: Recipe, cache: CompileCache, key: str, description: Mapping[str, Any]) -> Program:
    """Args: key: of the cache's entry; it stands for all that shapes the program.

    Raises: TraceError.
    """
    start = time.perf_counter()
    found = _load(recipe, cache, key)
    if found is None:
        source, pieces = _compile(recipe, cache, key, description)
        how = "traced and compiled"
    else:
        source, pieces = found
        how = f"reused from {cache.root / key}"
    logger.info(
        "compile: forward %s in %.2f s: %d pieces, %d of them different, run by %s",
        how,
        time.perf_counter() - start,
        sum(call.function in pieces for call in source.calls),
        len(pieces),
        recipe.compiler.name,
    )
    return Program(source, pieces, recipe.constants)


def _compile(
    recipe: Recipe, cache: CompileCache, key: str, description: Mapping[str, Any]
) -> tuple[ForwardSource, dict[str, Runnable]]:
    source = write_source(trace(recipe.forward, recipe.inputs, recipe.constants, recipe.device))
    made = {
        piece.name: [(sizes, *recipe.compiler.compile(piece, sizes)) for sizes in recipe.ranges]
        for piece in source.pieces
    }
    with cache.build(key, description) as folder:
        handles = {name: {str(sizes): save(folder) for sizes, _, save in each} for name, each in made.items()}
        (folder / _SOURCE).write_text(source.module)
        layout = {"source": dataclasses.asdict(source), "handles": handles}
        (folder / _LAYOUT).write_text(json.dumps(layout, indent=1))
    return source, {name: Ranged([(sizes, run) for sizes, run, _ in each]) for name, each in made.items()}


def _load(recipe: Recipe, cache: CompileCache, key: str) -> tuple[ForwardSource, dict[str, Runnable]] | None:
    folder = cache.find(key)
    if folder is None:
        return None
    try:
        layout = json.loads((folder / _LAYOUT).read_text())
        source = _source_of(layout["source"])
        return source, {piece.name: _load_piece(recipe, piece, layout["handles"], folder) for piece in source.pieces}
    except Exception as error:  # a compiler's own file may fail in any way
        cache.discard(key, f"{type(error).__name__}: {error}")
        return None


def _load_piece(recipe: Recipe, piece: Function, handles: dict[str, dict[str, str]], folder: Path) -> Runnable:
    own = handles[piece.name]
    return Ranged([(sizes, recipe.compiler.load(piece, own[str(sizes)], folder)) for sizes in recipe.ranges])


def _source_of(values: dict[str, Any]) -> ForwardSource:
    def spec(each: dict[str, Any]) -> TensorSpec:
        return TensorSpec(tuple(each["shape"]), tuple(each["strides"]), each["dtype"], each["device"])

    functions = [
        Function(each["name"], each["is_piece"], each["text"], tuple(map(spec, each["parameters"])))
        for each in values["functions"]
    ]
    calls = [Call(each["function"], tuple(each["constants"])) for each in values["calls"]]
    return ForwardSource(tuple(functions), tuple(calls), values["text"])
