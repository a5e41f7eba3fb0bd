"""EngineConfig: every setting of the engine, checked once."""

from dataclasses import dataclass, field
from typing import Any

from vllm_triton.compile.graphs.modes import CudagraphMode
from vllm_triton.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
# "auto" keeps keys and values in the dtype of the activations.
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
KV_CACHE_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}
LOAD_FORMATS = ("auto", "dummy")
# As it comes; GGUF's; methods of checkpoints; and what weights of full precision are rounded to at load, "fp8" too.
QUANTIZATIONS = (
    *("auto", "none", "gguf", "awq", "gptq", "compressed-tensors", "fp8"),
    *("fp8_per_tensor", "fp8_per_channel", "fp8_block", "int8_per_channel"),
)
COMPILE_BACKENDS = ("eager", "inductor")
CUDAGRAPH_MODES = tuple(mode.value for mode in CudagraphMode)
SCHEDULING_POLICIES = ("fcfs", "priority")
DTYPE_ALIASES = {"float": "float32", "half": "float16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class EngineConfig:
    """Settings of one engine, named as vLLM names them.

    Args:
        model: a Hugging Face folder, a .gguf file, or a hub id.
        dtype: of weights, activations and KV cache; "auto" takes the checkpoint's, or the platform's default.
        kv_cache_dtype: of keys and values in the cache: "auto" for dtype, or "fp8" ("fp8_e4m3"), which takes half the
            memory of bfloat16 and keeps 3 bits behind the point.
        quantization: "auto" takes weights as the checkpoint has them: quantized as its config.json says, or packed as
            in a GGUF file where a kernel multiplies by it; "gguf" keeps the latter always, "none" dequantises them at
            load. What has no packed form is dequantised in any case. "fp8_per_tensor", "fp8_per_channel", "fp8_block"
            and "int8_per_channel" round linear layers and experts of full precision when they are loaded, and
            activations per token (of blocks: per 128 columns of one). The name of a checkpoint's method asks for it.
        quantization_config: of weights of full precision, layer by layer: `linear` and `moe` replace `quantization` for
            one kind of layers, `ignore` lists layers that keep full precision, `targets` maps layers to schemes. Layers
            are named, or matched by `re:` and a regular expression or by a glob.
        max_model_len: longest sequence in tokens, prompt and output; None takes the model's context length.
        num_kv_blocks: blocks of the KV cache, the null block included; None derives it from the memory available.
        block_size: tokens per block of the KV cache, a power of two.
        max_num_seqs: requests in one step at most.
        max_num_batched_tokens: tokens in one step at most.
        long_prefill_token_threshold: tokens of one request in one step at most; 0 for no limit.
        enable_prefix_caching: reuses the KV blocks of equal prompt beginnings.
        scheduling_policy: "fcfs" or "priority".
        seed: of the draws of requests without a seed, and of dummy weights.
        kernels: op name -> implementation name.
        optimization_level: 0..3: 0 runs the model as it is, 1 compiles the forward in pieces and captures them, 2 and 3
            capture whole steps of decoding as well. None takes 2. Settings below win over it.
        cudagraph_mode: which graphs are captured: "none", "piecewise", "full" or "full_and_piecewise". What the device
            or an implementation cannot do is left out, and the log says so.
        cudagraph_capture_sizes: numbers of tokens to capture pieces for, and those up to max_num_seqs of requests that
            decode to capture whole steps for. None takes 1, 2, 4, the multiples of 8 up to max_num_seqs, at most 512,
            and that number itself.
        compile_backend: what runs the pieces of the forward: "eager", one kernel an op, or "inductor"; None takes the
            platform's default.
        compile_ranges: last numbers of tokens of ranges that pieces are compiled for; the last range ends at
            max_num_batched_tokens.
        compile_sizes: exact numbers of tokens that pieces are compiled for beside the ranges.
        load_format: "auto", or "dummy" for random weights.
        skip_tokenizer_init: takes and returns token ids only.
    Raises: ConfigError, which names the setting.
    """

    model: str
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    quantization_config: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    num_kv_blocks: int | None = None
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    seed: int = 0
    kernels: dict[str, str] = field(default_factory=dict)
    optimization_level: int | None = None
    cudagraph_mode: str | None = None
    cudagraph_capture_sizes: list[int] | None = None
    compile_backend: str | None = None
    compile_ranges: list[int] = field(default_factory=list)
    compile_sizes: list[int] = field(default_factory=list)
    load_format: str = "auto"
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        self.model = str(self.model)
        self.dtype = str(self.dtype).removeprefix("torch.")
        self.dtype = DTYPE_ALIASES.get(self.dtype, self.dtype)
        _one_of("dtype", self.dtype, DTYPES)
        self.kv_cache_dtype = KV_CACHE_DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        if not isinstance(self.quantization_config, dict):
            raise ConfigError(f"quantization_config must be an object with fields, got {self.quantization_config!r}")
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("num_kv_blocks", self.num_kv_blocks, 2)
        _at_least("block_size", self.block_size, 1)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _at_least("seed", self.seed, 0)
        if self.optimization_level is not None:
            _one_of("optimization_level", self.optimization_level, (0, 1, 2, 3))
        if self.cudagraph_mode is not None:
            _one_of("cudagraph_mode", self.cudagraph_mode, CUDAGRAPH_MODES)
        for size in self.cudagraph_capture_sizes or ():
            _at_least("cudagraph_capture_sizes", size, 1)
            if size > self.max_num_batched_tokens:
                raise ConfigError(
                    "cudagraph_capture_sizes must be at most "
                    f"max_num_batched_tokens={self.max_num_batched_tokens}, got {size}"
                )
        if self.compile_backend is not None:
            _one_of("compile_backend", self.compile_backend, COMPILE_BACKENDS)
        for name in ("compile_ranges", "compile_sizes"):
            for size in getattr(self, name):
                _at_least(name, size, 1)
                if size > self.max_num_batched_tokens:
                    raise ConfigError(
                        f"{name} must be at most max_num_batched_tokens={self.max_num_batched_tokens}, got {size}"
                    )
        if not isinstance(self.kernels, dict):
            raise ConfigError(f"kernels must map op names to implementation names, got {self.kernels!r}")


def _one_of(name: str, value: Any, options: tuple[Any, ...]) -> None:
    if value not in options or isinstance(value, bool):
        raise ConfigError(f"{name} must be one of {', '.join(map(str, options))}, got {value!r}")


def _at_least(name: str, value: Any, least: int) -> None:
    if value is None and name in ("max_model_len", "num_kv_blocks"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
