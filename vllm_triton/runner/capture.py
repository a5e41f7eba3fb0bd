"""Which graphs an engine captures when it starts: what was asked for, less what cannot be had here."""

import logging
import time
from collections.abc import Mapping

import torch

from vllm_triton import envs
from vllm_triton.compile.graphs.backend import GraphBackend
from vllm_triton.compile.graphs.checking import CheckedGraphs
from vllm_triton.compile.graphs.cuda import CudaGraphs
from vllm_triton.compile.graphs.modes import CudagraphMode, default_capture_sizes
from vllm_triton.compile.graphs.recording import CpuGraphs
from vllm_triton.config import EngineConfig
from vllm_triton.ops.platforms import Platform, triton_interprets, why_not_triton
from vllm_triton.ops.registry import OPS, Capture
from vllm_triton.runner.model_runner import DecodeState, ModelRunner

logger = logging.getLogger(__name__)

_MODES_OF_LEVELS = (
    CudagraphMode.NONE,
    CudagraphMode.PIECEWISE,
    CudagraphMode.FULL_AND_PIECEWISE,
    CudagraphMode.FULL_AND_PIECEWISE,
)
DEFAULT_LEVEL = 2
# What a whole step of decoding runs; the sampler's other ops stay outside of graphs.
STEP_OPS = (
    "embedding",
    "fused_add_rms_norm",
    "linear",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "sample_tokens",
    "silu_and_mul",
)


def capture(runner: ModelRunner, config: EngineConfig, platform: Platform, selection: Mapping[str, str]) -> None:
    """Captures what the settings ask for, and says what it captured or why it did not.

    Args: selection: op -> implementation.
    Raises: RecordingError, on a GPU CaptureError, where an op does what it does not own up to.
    """
    level = DEFAULT_LEVEL if config.optimization_level is None else config.optimization_level
    mode = _MODES_OF_LEVELS[level] if config.cudagraph_mode is None else CudagraphMode(config.cudagraph_mode)
    if mode is CudagraphMode.NONE:
        logger.info("graphs: none, as asked for")
        return
    if not mode.has_full:
        logger.info("graphs: none, since pieces of steps cannot be captured yet")
        return
    reason = why_no_graphs(platform, selection)
    if reason is not None:
        logger.info("graphs: none, since %s", reason)
        return
    sizes = config.cudagraph_capture_sizes or default_capture_sizes(config.max_num_seqs)
    backend = graph_backend(platform)
    if envs.graph_check():
        backend = CheckedGraphs(backend, DecodeState(runner))
        logger.warning("graphs: every replay is compared with the same step uncaptured (VLLM_TRITON_GRAPH_CHECK)")
    start = time.perf_counter()
    runner.capture_decoding(backend, sizes)
    logger.info(
        "graphs: captured decoding for %s requests in %.1f s, which take %.1f MiB; other steps run eagerly",
        ", ".join(map(str, sorted(sizes))),
        time.perf_counter() - start,
        backend.num_bytes / 2**20,
    )


def graph_backend(platform: Platform) -> GraphBackend:
    return CpuGraphs() if platform.device == "cpu" else CudaGraphs(torch.device(platform.device))


def why_no_graphs(platform: Platform, selection: Mapping[str, str]) -> str | None:
    """The reason why whole decode steps cannot be captured, or None."""
    if triton_interprets():
        return "Triton's interpreter launches nothing"
    reason = why_not_triton(platform.device)
    if reason is not None:
        return reason
    for op in STEP_OPS:
        if OPS[op].implementations[selection[op]].captured_in(platform.device) < Capture.SINGLE_TOKEN_DECODE:
            return f"{op}={selection[op]} cannot be captured on {platform.name}"
    return None
