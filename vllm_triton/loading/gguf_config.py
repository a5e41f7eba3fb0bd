"""Translates a GGUF file's metadata into the form of Hugging Face's config.json."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_triton.errors import ModelError
from vllm_triton.loading.gguf_file import GgufFile

# GGUF architecture -> (model_type, class name) of config.json. Mistral's files say `llama`.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
DEFAULT_ROPE_THETA = 10000.0
# Only ratios of llama3's three lengths matter, and the file does not keep this one: see llama3_rope_scaling.
LLAMA3_ORIGINAL_LENGTH = 8192
# Stored factors are float32 values that a converter computed in float32.
ROPE_FACTOR_TOLERANCE = 1e-3


def architecture(metadata: Mapping[str, Any]) -> str:
    """general.architecture. Raises: ModelError, listing the supported ones."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"GGUF field general.architecture is {name!r}; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return name


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The model's configuration, with the field names of config.json.

    Raises: ModelError, naming the field that is missing or that the supported architectures have no place for.
    """
    metadata = file.metadata
    gguf_architecture = architecture(metadata)

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{gguf_architecture}.{name}", default)
        if value is None:
            raise ModelError(f"{file.path} lacks the GGUF field {gguf_architecture}.{name}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(
                    f"GGUF field {gguf_architecture}.{name} of {file.path} differs between layers ({value}): "
                    "layers of different shapes are not supported"
                )
            value = value[0]
        return value

    if field("expert_count", 0) > 0:
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported in GGUF: use its safetensors")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    num_heads = field("attention.head_count")
    head_dim = field("attention.key_length", field("embedding_length") // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if field(name, head_dim) != head_dim:
            raise ModelError(
                f"GGUF field {gguf_architecture}.{name} of {file.path} is {field(name)}; it must equal the head size "
                f"{head_dim}"
            )
    model_type, class_name = ARCHITECTURES[gguf_architecture]
    rope_theta = float(field("rope.freq_base", DEFAULT_ROPE_THETA))
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": field("embedding_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": field("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": field("context_length"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, gguf_architecture, rope_theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    window = metadata.get(f"{gguf_architecture}.attention.sliding_window")
    if window:
        config["sliding_window"] = window
        config["use_sliding_window"] = True
    return config


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Ids that begin and end a generation, as in generation_config.json: end of sequence, turn and message."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config: dict[str, Any] = {}
    if any(token is not None for token in ends):
        config["eos_token_id"] = list(dict.fromkeys(token for token in ends if token is not None))
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    return config


def _rope_scaling(file: GgufFile, gguf_architecture: str, rope_theta: float, head_dim: int) -> dict[str, Any] | None:
    prefix = f"{gguf_architecture}.rope.scaling"
    if "rope_freqs.weight" in file.tensors:
        tensor = file.tensors["rope_freqs.weight"]
        return llama3_rope_scaling(file.dequantize(tensor), rope_theta, head_dim)
    kind = file.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"GGUF field {prefix}.type of {file.path} is {kind!r}; supported are none, linear, yarn")
    factor = file.metadata.get(f"{prefix}.factor")
    if factor is None:
        raise ModelError(f"{file.path} lacks the GGUF field {prefix}.factor")
    scaling = {"rope_type": kind, "factor": factor}
    original_length = file.metadata.get(f"{prefix}.original_context_length")
    if kind == "yarn" and original_length is not None:
        scaling["original_max_position_embeddings"] = original_length
    return scaling


def llama3_rope_scaling(factors: np.ndarray, rope_theta: float, head_dim: int) -> dict[str, Any] | None:
    """Recovers config.json's llama3 rope scaling from the frequency divisors that a GGUF file stores.

    With turns[i] = original_length / wavelength[i], llama3's divisor is 1 where turns > high, `factor` where
    turns < low, and between them
        1 / divisor[i] = (1 - smooth[i]) / factor + smooth[i],  smooth[i] = (turns[i] - low) / (high - low).
    smooth is linear in 1 / wavelength, so a line through it gives low and high for any chosen original length.

    Args:
        factors: [head_dim / 2], each frequency is divided by its factor.
        rope_theta: base of the rotary frequencies.
    Returns: the `rope_scaling` entry, or None if no frequency is changed.
    Raises: ModelError if the factors are not llama3's.
    """
    if factors.shape != (head_dim // 2,):
        raise ModelError(f"tensor rope_freqs.weight must have {head_dim // 2} values, got {list(factors.shape)}")
    factors = factors.astype(np.float64)
    if np.all(factors == 1):
        return None
    per_token = rope_theta ** (-2 * np.arange(head_dim // 2) / head_dim) / (2 * math.pi)  # 1 / wavelength
    largest = float(factors.max())
    between = (factors > 1) & (factors < largest)
    if between.sum() < 2:
        raise ModelError("tensor rope_freqs.weight does not hold llama3's rope factors, the only ones supported")
    smooth = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
    slope, intercept = np.polyfit(per_token[between], smooth, 1)
    low = -intercept / slope * LLAMA3_ORIGINAL_LENGTH
    high = (1 - intercept) / slope * LLAMA3_ORIGINAL_LENGTH
    turns = LLAMA3_ORIGINAL_LENGTH * per_token
    expected = 1 / (1 / largest + np.clip((turns - low) / (high - low), 0, 1) * (1 - 1 / largest))
    if low >= high or not np.allclose(expected, factors, rtol=ROPE_FACTOR_TOLERANCE, atol=0):
        raise ModelError("tensor rope_freqs.weight does not hold llama3's rope factors, the only ones supported")
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": round(low, 4),
        "high_freq_factor": round(high, 4),
        "original_max_position_embeddings": LLAMA3_ORIGINAL_LENGTH,
    }
