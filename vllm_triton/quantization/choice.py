"""From the settings and the checkpoint to the schemes of a model's layers."""

from vllm_triton.config import EngineConfig
from vllm_triton.errors import ConfigError
from vllm_triton.loading import Checkpoint
from vllm_triton.ops.gguf_mm.layout import FORMATS
from vllm_triton.quantization.online import ONLINE, OnlineSchemes
from vllm_triton.quantization.schemes import GgufScheme, LayerKind, Scheme, Schemes, dense
from vllm_triton.quantization.stored import METHODS, stored_config, stored_schemes


def choose_schemes(config: EngineConfig, checkpoint: Checkpoint, has_gguf_kernel: bool) -> Schemes:
    """Args: has_gguf_kernel: a kernel multiplies by packed GGUF weights; else each product would unpack all of one.

    Raises: ConfigError for settings that do not fit the checkpoint, ModelError for what it has and nobody supports.
    """
    stored, name = stored_config(checkpoint.config), config.quantization
    if stored:
        return _stored(config, stored, checkpoint.source)
    if name == "fp8":
        name = "fp8_per_tensor"
    if name in METHODS:
        raise ConfigError(
            f"quantization must not be {name} for {checkpoint.source}: its config.json has no quantization_config; "
            f"{', '.join(ONLINE)} quantize weights of full precision"
        )
    if name == "gguf" and config.quantization_config:
        raise ConfigError(
            "quantization_config must be left out with quantization gguf, which keeps weights as they are"
        )
    if name in ONLINE or config.quantization_config:
        return OnlineSchemes(name if name in ONLINE else None, config.quantization_config)
    if name == "gguf" and not checkpoint.packed_formats:
        raise ConfigError(
            f"quantization must be auto or none for {checkpoint.source}, got gguf: it holds no weights of the types "
            f"{', '.join(FORMATS)} of a GGUF file"
        )
    is_packed = name == "gguf" or (name == "auto" and has_gguf_kernel)
    if not is_packed or config.load_format == "dummy":
        return dense
    formats = checkpoint.packed_formats

    def packed(layer: str, kind: LayerKind) -> Scheme | None:
        return GgufScheme(formats[f"{layer}.weight"]) if f"{layer}.weight" in formats else None

    return packed


def _stored(config: EngineConfig, stored: object, source: str) -> Schemes:
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    schemes = stored_schemes(stored, source)
    quantized = f"for {source}, whose weights are quantized already"
    if config.quantization not in ("auto", method):
        raise ConfigError(f"quantization must be auto or {method} {quantized}, got {config.quantization}")
    if config.quantization_config:
        raise ConfigError(f"quantization_config must be left out {quantized}, got {config.quantization_config}")
    if config.load_format == "dummy":
        raise ConfigError(
            f"load_format must be auto {quantized}, got dummy: take the "
            f"checkpoint that it was made of and one of {', '.join(ONLINE)}"
        )
    return schemes
