"""From EngineConfig to a runner: checkpoint, weights, KV cache, kernel choice."""

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from vllm_triton import envs
from vllm_triton.compile.triton_cpu import preparing as triton_cpu_preparing
from vllm_triton.config import DTYPES, EngineConfig
from vllm_triton.errors import ConfigError
from vllm_triton.kv_cache.spec import FullAttentionSpec, max_sequence_length, num_blocks_that_fit
from vllm_triton.loading import Checkpoint, open_checkpoint
from vllm_triton.loading.weights import fill_dummy_weights, load_weights, packed_names
from vllm_triton.models.config import ModelConfig, parse_dtype
from vllm_triton.models.interface import CausalLM, KVCache
from vllm_triton.models.packed_weight import schemes_of
from vllm_triton.models.registry import make_model
from vllm_triton.ops import registry
from vllm_triton.ops.contract import FLOATS
from vllm_triton.ops.platforms import Platform, current_platform, triton_interprets, why_not_triton
from vllm_triton.ops.registry import OPS, Capture
from vllm_triton.quantization.choice import choose_schemes
from vllm_triton.quantization.online import OnlineSchemes
from vllm_triton.quantization.schemes import ScaledScheme
from vllm_triton.quantization.stored import has_kv_scales, stored_config
from vllm_triton.runner.capture import compile_and_capture
from vllm_triton.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_KV_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A runner and what the rest of the engine must know about it."""

    runner: ModelRunner
    checkpoint: Checkpoint
    model_config: ModelConfig
    max_model_len: int
    num_kv_blocks: int


@torch.inference_mode()
def load_model(config: EngineConfig) -> LoadedModel:
    """Raises: ModelError for the checkpoint, ConfigError and RegistryError for the settings."""
    start = time.perf_counter()
    platform = current_platform()
    device = torch.device(platform.device)
    if platform.device == "cpu" and not triton_interprets() and why_not_triton("cpu") is None:
        triton_cpu_preparing.prepare()  # while the weights load and the forward is traced
    checkpoint = open_checkpoint(config.model)
    model_config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config, checkpoint.source)
    dtype = _dtype(config, checkpoint, platform)
    kv_cache_dtype = _KV_CACHE_DTYPES.get(config.kv_cache_dtype, dtype)
    model_config = dataclasses.replace(
        model_config,
        quantized_kv_cache=kv_cache_dtype != dtype,
        stored_kv_scales=has_kv_scales(stored_config(checkpoint.config)),
    )
    max_model_len = _max_model_len(config, model_config)
    situation = registry.Situation(
        device=platform.device,
        dtype=dtype,
        head_size=model_config.head_size,
        block_size=config.block_size,
        sliding_window=max(model_config.layer_windows) or None,
        kv_cache_dtype=kv_cache_dtype,
    )
    choices = registry.parse_choices(envs.kernels()) | config.kernels
    explained = registry.explain(choices, situation)  # refuses a bad choice before the weights are read
    schemes = choose_schemes(config, checkpoint, _has_gguf_kernel({row["op"]: row["chosen"] for row in explained}))

    with torch.device(device), _default_dtype(dtype):
        model = make_model(model_config, max_model_len, schemes)
    if isinstance(schemes, OnlineSchemes):
        schemes.check_used()
    situation = dataclasses.replace(situation, weight_dtype=_weight_dtype(model))
    if config.load_format == "dummy":
        fill_dummy_weights(model, config.seed)
    else:
        load_weights(model, checkpoint.tensors(packed_names(model)), checkpoint.source)
    model.finish_loading(device)
    loaded = time.perf_counter()

    spec = FullAttentionSpec(
        config.block_size,
        num_kv_heads=model_config.num_kv_heads,
        head_size=model_config.head_size,
        dtype_size_bytes=kv_cache_dtype.itemsize,
        num_layers=model_config.num_layers,
    )
    num_kv_blocks = config.num_kv_blocks or _num_kv_blocks(config, spec, max_model_len, platform)
    runner = ModelRunner(
        model,
        _allocate_kv_caches(spec, num_kv_blocks, kv_cache_dtype, device),
        device,
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        max_model_len,
    )
    logger.info(
        "loaded %s (%s, %s, weights of %.0f MB%s) on %s in %.1f s; "
        "KV cache of %d blocks (%s) holds %d tokens (%.2f GiB)",
        checkpoint.source,
        model_config.architecture,
        str(dtype).removeprefix("torch."),
        sum(parameter.nbytes for _, parameter in model.named_parameters()) / 1e6,
        _held(model),
        platform.name,
        loaded - start,
        num_kv_blocks,
        str(kv_cache_dtype).removeprefix("torch."),
        max_sequence_length(spec, num_kv_blocks),
        num_kv_blocks * spec.block_size_bytes / 2**30,
    )
    if max_sequence_length(spec, num_kv_blocks) < max_model_len:
        logger.warning(
            "the KV cache is smaller than max_model_len=%d: raise num_kv_blocks for long texts", max_model_len
        )
    selection = registry.freeze(choices, situation)
    logger.info("kernels: %s", ", ".join(f"{op}={name}" for op, name in selection.items()))
    compile_and_capture(runner, config, platform, selection)
    return LoadedModel(runner, checkpoint, model_config, max_model_len, num_kv_blocks)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Of tensors made without one. To convert a model on the meta device instead would import SymPy: 35 MiB, 0.3 s."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _dtype(config: EngineConfig, checkpoint: Checkpoint, platform: Platform) -> torch.dtype:
    if config.dtype != "auto":
        return parse_dtype(config.dtype)
    dtype = checkpoint.torch_dtype or platform.default_dtype
    if dtype not in FLOATS:
        raise ConfigError(
            f"{checkpoint.source} is stored as {dtype}, in which nothing is computed here: set dtype to one of "
            f"{', '.join(DTYPES[1:])}"
        )
    return dtype


def _has_gguf_kernel(selection: Mapping[str, str]) -> bool:
    """Args: selection: op -> implementation."""
    return OPS["gguf_mm"].implementations[selection["gguf_mm"]].captured_in("cpu") is not Capture.NEVER


def _held(model: CausalLM) -> str:
    """How weights are held that are not of full precision, for the log."""
    counts = Counter(map(str, schemes_of(model)))
    return "".join(f", {count} of {scheme}" for scheme, count in counts.items())


def _weight_dtype(model: CausalLM) -> torch.dtype | None:
    """Of scaled weights: the one that not every device has, if any is of it."""
    dtypes = {scheme.weight.dtype for scheme in schemes_of(model) if isinstance(scheme, ScaledScheme)}
    return torch.float8_e4m3fn if torch.float8_e4m3fn in dtypes else next(iter(dtypes), None)


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.max_model_len is None:
        return model_config.max_position
    if config.max_model_len > model_config.max_position:
        raise ConfigError(
            f"max_model_len must be at most the model's context of {model_config.max_position} tokens, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len


def _num_kv_blocks(config: EngineConfig, spec: FullAttentionSpec, max_model_len: int, platform: Platform) -> int:
    """As many blocks as the platform lets the cache have, but no more than all requests at full length can use."""
    most = config.max_num_seqs * spec.num_blocks_for(max_model_len) + 1
    return min(most, num_blocks_that_fit(spec, platform.kv_cache_memory()))


def _allocate_kv_caches(
    spec: FullAttentionSpec, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """Uninitialised: the host's memory is mapped block by block as requests fill it."""
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(spec.num_layers)
    ]
