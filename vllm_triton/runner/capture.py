"""What an engine compiles and captures when it starts: resolves levels and modes, and says in the log what came of it.

A mode that the device, an implementation or a compiler cannot follow is lowered, with the reason; it is no error.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from vllm_triton import envs
from vllm_triton.compile.graphs.backend import GraphBackend
from vllm_triton.compile.graphs.checking import CheckedGraphs, ResultsAlone
from vllm_triton.compile.graphs.cuda import CudaGraphs
from vllm_triton.compile.graphs.modes import CudagraphMode, default_capture_sizes
from vllm_triton.compile.graphs.recording import CpuGraphs
from vllm_triton.compile.pieces.compilers import COMPILERS
from vllm_triton.compile.pieces.source import ForwardSource
from vllm_triton.config import EngineConfig
from vllm_triton.ops.platforms import Platform, triton_interprets, why_not_triton
from vllm_triton.ops.registry import OPS, Capture
from vllm_triton.runner.compilation import compile_forward, compile_kernels
from vllm_triton.runner.model_runner import DecodeState, ModelRunner

logger = logging.getLogger(__name__)

_MODES_OF_LEVELS = (
    CudagraphMode.NONE,
    CudagraphMode.PIECEWISE,
    CudagraphMode.FULL_AND_PIECEWISE,
    CudagraphMode.FULL_AND_PIECEWISE,
)
DEFAULT_LEVEL = 2
# What a whole step runs after the forward; the sampler's other ops stay outside of graphs.
_OPS_AFTER_FORWARD = frozenset({"linear", "sample_tokens"})


def compile_and_capture(
    runner: ModelRunner, config: EngineConfig, platform: Platform, selection: Mapping[str, str]
) -> None:
    """Does what the settings ask for, as far as it can be done.

    Args: selection: op -> implementation.
    Raises: TraceError for a forward that cannot be traced; CaptureError where an op does what it does not own up to.
    """
    level = DEFAULT_LEVEL if config.optimization_level is None else config.optimization_level
    asked = _MODES_OF_LEVELS[level] if config.cudagraph_mode is None else CudagraphMode(config.cudagraph_mode)
    if level == 0 and asked is CudagraphMode.NONE:
        logger.info("compile: nothing, as asked for (-O0): kernels compile when they are first needed")
        return
    compile_backend = config.compile_backend or platform.compile_backend
    logger.info("compile: -O%d on %s with pieces run by %s", level, platform.name, compile_backend)
    program = compile_forward(runner.model, runner.kv_caches, config, platform, selection)
    compile_kernels(runner, program, platform, config)
    launches_only = COMPILERS[compile_backend]().launches_only
    # Checks follow the ops of a run.
    runner.use(program.through_dispatcher() if envs.graph_check() and launches_only else program)
    capped = {"softcap_logits"} if runner.model.config.final_softcap else set()
    capturable = Capturable.of(program.source, platform, selection, launches_only, _OPS_AFTER_FORWARD | capped)
    _capture(runner, config, platform, asked, capturable)


@dataclass(frozen=True)
class Capturable:
    """Why pieces, and whole steps, cannot be captured; None where they can."""

    why_no_pieces: str | None
    why_no_steps: str | None

    @classmethod
    def of(
        cls,
        source: ForwardSource,
        platform: Platform,
        selection: Mapping[str, str],
        launches_only: bool,
        after_forward: frozenset[str] = _OPS_AFTER_FORWARD,
    ) -> "Capturable":
        """Args: launches_only: of the compiler of the pieces. after_forward: ops of a step that follow the forward."""
        in_pieces = source.ops_of(source.pieces)
        in_steps = source.ops_of(source.functions) | after_forward
        reason = _why_no_graphs(platform)
        if reason is None and platform.device == "cpu" and not launches_only:
            reason = "a CPU captures launches of Triton kernels alone, which compiled pieces are not"
        return cls(
            reason or _why_not(in_pieces, Capture.ALWAYS, platform, selection),
            reason or _why_not(in_steps, Capture.SINGLE_TOKEN_DECODE, platform, selection),
        )


def _why_no_graphs(platform: Platform) -> str | None:
    if triton_interprets():
        return "Triton's interpreter launches nothing"
    return why_not_triton(platform.device)


def graph_backend(platform: Platform) -> GraphBackend:
    return CpuGraphs() if platform.device == "cpu" else CudaGraphs(torch.device(platform.device))


def _why_not(ops: Iterable[str], needed: Capture, platform: Platform, selection: Mapping[str, str]) -> str | None:
    for op in sorted(ops):
        if OPS[op].implementations[selection[op]].captured_in(platform.device) < needed:
            return f"{op}={selection[op]} cannot be captured on {platform.name}"
    return None


def _capture(
    runner: ModelRunner, config: EngineConfig, platform: Platform, asked: CudagraphMode, capturable: Capturable
) -> None:
    if asked is CudagraphMode.NONE:
        logger.info("graphs: none, as asked for")
        return
    if asked.has_pieces and capturable.why_no_pieces:
        logger.info("graphs: no pieces, since %s", capturable.why_no_pieces)
    if asked.has_full and capturable.why_no_steps:
        logger.info("graphs: no whole steps, since %s", capturable.why_no_steps)
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    sizes = config.cudagraph_capture_sizes or default_capture_sizes(most)
    step_sizes = [size for size in sizes if size <= most]
    backend = graph_backend(platform)
    whole = pieces = backend
    if envs.graph_check():
        whole, pieces = CheckedGraphs(backend, DecodeState(runner)), CheckedGraphs(backend, ResultsAlone())
        logger.warning("graphs: every replay is compared with the same work uncaptured (VLLM_TRITON_GRAPH_CHECK)")
    start, captured = time.perf_counter(), []
    if asked.has_pieces and not capturable.why_no_pieces:
        runner.capture_pieces(pieces, sizes)
        captured.append(f"pieces of steps of {_listed(sizes)} tokens")
    if asked.has_full and not capturable.why_no_steps and step_sizes:
        runner.capture_decoding(whole, step_sizes)
        captured.append(f"whole steps of decoding for {_listed(step_sizes)} requests")
    if not captured:
        return
    logger.info("graphs: captured %s in %.2f s", " and ".join(captured), time.perf_counter() - start)
    logger.info("graphs: hold %.1f MiB beside weights and KV cache", backend.num_bytes / 2**20)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))
