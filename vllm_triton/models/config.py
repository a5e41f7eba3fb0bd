"""ModelConfig: what a checkpoint's config.json says about a decoder, in one form for all families."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_triton.errors import ModelError
from vllm_triton.ops.fused_moe.reference import SWIGLU_ALPHA

# SmolLM2 is LlamaForCausalLM, Phi-4 is Phi3ForCausalLM; models/registry.py has the decoder of each.
ARCHITECTURES = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
GEMMAS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
GPT_OSS = "GptOssForCausalLM"
# Of the feed-forward layer's gate; gelu_pytorch_tanh is the approximate form.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding.

    Args:
        theta: base of the frequencies.
        rotary_size: dimensions of a head that are rotated.
        kind: one of ROPE_TYPES.
        parameters: the settings of that kind, as the checkpoint names them.
        max_position: the longest context of the model, in tokens.
    """

    theta: float
    rotary_size: int
    kind: str
    parameters: dict[str, Any]
    max_position: int


@dataclass(frozen=True)
class MoeConfig:
    """Experts in place of a feed-forward layer.

    Args:
        intermediate_size: of each expert.
        renormalize: a token's routing weights sum to 1.
        sparse_layers: per layer, whether it has experts.
        bias: of the router and of the experts' projections.
        swiglu_limit: bound on gate and up of gpt-oss's activation; 0 for silu.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    sparse_layers: tuple[bool, ...]
    bias: bool = False
    swiglu_limit: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder.

    fused_projections: the checkpoint holds queries, keys and values as one matrix, and gate and up as another.
    activation: one of ACTIVATIONS.
    layer_windows: per layer, how many of the last positions a query sees, itself included; 0 for all.
    attention_scale: factor on the scores.
    attention_sinks: each head has a score for one more key, whose value is zero.
    attention_softcap, final_softcap: bounds on the scores and on the logits; 0 for none.
    local_rope: of layers that have a window; None where it is that of the others.
    moe: None where no layer has experts.
    eos_token_ids: ids that end a sequence.
    quantized_kv_cache: keys and values are cached with a scale; no checkpoint says so, but the engine's settings.
    stored_kv_scales: the checkpoint holds these scales, whether they are needed or not.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused_projections: bool
    activation: str
    layer_windows: tuple[int, ...]
    attention_scale: float
    attention_sinks: bool
    attention_softcap: float
    final_softcap: float
    rope: RopeConfig
    local_rope: RopeConfig | None
    moe: MoeConfig | None
    eos_token_ids: frozenset[int]
    quantized_kv_cache: bool = False
    stored_kv_scales: bool = False

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation_config: dict[str, Any], source: str) -> "ModelConfig":
        """Reads a config.json (and generation_config.json for the EOS ids).

        Raises: ModelError, which names the field that is missing or not supported.
        """
        fields = _Fields(config, source)
        architecture = _architecture(fields)
        is_gemma, is_gpt_oss = architecture in GEMMAS, architecture == GPT_OSS
        if is_gemma and config.get("use_bidirectional_attention"):
            raise fields.error("use_bidirectional_attention", "is not supported: only causal attention is")
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.error(
                "num_key_value_heads", f"must divide num_attention_heads={num_heads}, got {num_kv_heads}"
            )
        hidden_size = fields.integer("hidden_size")
        head_size = fields.integer("head_dim", 256 if is_gemma else 64 if is_gpt_oss else hidden_size // num_heads)
        num_layers = fields.integer("num_hidden_layers")
        max_position = fields.integer("max_position_embeddings")
        attention_bias = bool(config.get("attention_bias", is_gpt_oss))
        vocab_size = fields.integer("vocab_size")
        rope, local_rope = _ropes(fields, architecture, head_size, max_position)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position=max_position,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", is_gemma)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"),
            fused_projections=architecture == "Phi3ForCausalLM",
            activation=_activation(fields, is_gemma),
            layer_windows=_layer_windows(fields, architecture, num_layers, max_position),
            attention_scale=(fields.number("query_pre_attn_scalar", 256) if is_gemma else head_size) ** -0.5,
            attention_sinks=is_gpt_oss,
            attention_softcap=_softcap(fields, "attn_logit_softcapping", architecture, 50.0),
            final_softcap=_softcap(fields, "final_logit_softcapping", architecture, 30.0),
            rope=rope,
            local_rope=local_rope,
            moe=_moe(fields, architecture, num_layers),
            eos_token_ids=_eos_token_ids(config, generation_config, vocab_size),
        )


class _Fields:
    """A config.json with errors that name the field and the file."""

    def __init__(self, config: dict[str, Any], source: str):
        self.config = config
        self.source = source

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.source}: config field {name} {problem}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(name, f"must be a positive number, got {value!r}")
        return value


def _architecture(fields: _Fields) -> str:
    named = fields.config.get("architectures") or []
    for architecture in named:
        if architecture in ARCHITECTURES:
            return architecture
    raise fields.error("architectures", f"must name one of {', '.join(ARCHITECTURES)}, got {named}")


def _activation(fields: _Fields, is_gemma: bool) -> str:
    name, default = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    activation = fields.config.get(name) or default
    if activation not in ACTIVATIONS:
        raise fields.error(name, f"must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return activation


def _softcap(fields: _Fields, name: str, architecture: str, gemma2s: float) -> float:
    """0 where there is none. Args: gemma2s: of a Gemma 2 without the field; null means none there too."""
    default = gemma2s if architecture == "Gemma2ForCausalLM" else None
    if architecture not in GEMMAS or fields.config.get(name, default) is None:
        return 0.0
    return float(fields.number(name, gemma2s))


def _layer_windows(fields: _Fields, architecture: str, num_layers: int, max_position: int) -> tuple[int, ...]:
    config = fields.config
    # A Mistral or Gemma without the field has the family's window of 4096; a Mistral's null means none.
    window = config.get("sliding_window", 4096 if architecture == "MistralForCausalLM" else None)
    kinds = config.get("layer_types")
    if architecture in (*GEMMAS, GPT_OSS):
        window = fields.integer("sliding_window", 128 if architecture == GPT_OSS else 4096)
        # Older files give the distance between layers that see everything.
        every = fields.integer("sliding_window_pattern", 6) if architecture == "Gemma3ForCausalLM" else 2
        if kinds is None:
            is_full = [(layer + 1) % every == 0 for layer in range(num_layers)]
            kinds = ["full_attention" if full else "sliding_attention" for full in is_full]
    elif architecture == "LlamaForCausalLM" or window is None:
        return (0,) * num_layers
    elif architecture in ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"):
        window = fields.integer("sliding_window", window)
        return (window if window < max_position else 0,) * num_layers  # Phi's may be longer than any text
    elif not config.get("use_sliding_window", False):
        return (0,) * num_layers
    elif kinds is None and architecture == "Qwen3MoeForCausalLM":
        return (fields.integer("sliding_window", window),) * num_layers
    elif kinds is None:
        first = config.get("max_window_layers", num_layers)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", f"must name sliding_attention or full_attention per layer, got {kinds}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _moe(fields: _Fields, architecture: str, num_layers: int) -> MoeConfig | None:
    if architecture not in (GPT_OSS, "MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    config = fields.config
    if (activation := _activation(fields, is_gemma=False)) != "silu":
        raise fields.error("hidden_act", f"must be silu where layers have experts, got {activation!r}")
    # Newer files of Qwen3-MoE have Mixtral's name for it.
    count_name = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts, per_token = fields.integer(count_name), fields.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise fields.error("num_experts_per_tok", f"must be at most {count_name}={num_experts}, got {per_token}")
    if architecture != "Qwen3MoeForCausalLM":
        moe = MoeConfig(num_experts, per_token, fields.integer("intermediate_size"), True, (True,) * num_layers)
        return replace(moe, bias=True, swiglu_limit=_swiglu_limit(fields)) if architecture == GPT_OSS else moe
    step, dense = fields.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not all(layer in range(num_layers) for layer in dense):
        raise fields.error("mlp_only_layers", f"must list layers from 0 to {num_layers - 1}, got {dense}")
    sparse_layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    renormalize = bool(config.get("norm_topk_prob", False))
    return MoeConfig(num_experts, per_token, fields.integer("moe_intermediate_size"), renormalize, sparse_layers)


def _swiglu_limit(fields: _Fields) -> float:
    if (alpha := fields.number("swiglu_alpha", SWIGLU_ALPHA)) != SWIGLU_ALPHA:
        raise fields.error("swiglu_alpha", f"must be {SWIGLU_ALPHA}, got {alpha}")
    return float(fields.number("swiglu_limit", 7.0))


def _ropes(
    fields: _Fields, architecture: str, head_size: int, max_position: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Of layers that see everything, or of all; and of those that have a window, where it differs."""
    config = fields.config
    # Newer files hold one rope_parameters; older ones rope_theta beside an optional rope_scaling.
    parameters = dict(config.get("rope_parameters") or {})
    scaling, theta = dict(config.get("rope_scaling") or {}), config.get("rope_theta")
    if architecture == "Phi3ForCausalLM":
        parameters = _longrope_parameters(fields, scaling | parameters)
    if architecture == GPT_OSS:  # there is none with plain angles
        if not scaling | parameters:
            raise fields.error("rope_scaling", "is missing")
        theta = theta or 150000.0
    if architecture != "Gemma3ForCausalLM":
        return _rope(fields, scaling | parameters, theta or 10000.0, head_size, max_position), None
    full, local = (dict(parameters.get(kind) or {}) for kind in ("full_attention", "sliding_attention"))
    local_theta = config.get("rope_local_base_freq") or 10000.0
    return (
        _rope(fields, scaling | full, theta or 1e6, head_size, max_position),
        _rope(fields, local, local_theta, head_size, max_position),
    )


def _longrope_parameters(fields: _Fields, parameters: dict[str, Any]) -> dict[str, Any]:
    """Phi-3's settings under today's names: its first files say "su" or "yarn" for longrope, and the length that the
    model was trained with first stands beside them.
    """
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in ("su", "yarn", "longrope"):
        return parameters
    original = fields.config.get("original_max_position_embeddings")
    return parameters | {"rope_type": "longrope"} | ({"original_max_position_embeddings": original} if original else {})


def _rope(
    fields: _Fields, parameters: dict[str, Any], default_theta: float, head_size: int, max_position: int
) -> RopeConfig:
    theta = parameters.pop("rope_theta", None) or default_theta
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind not in ROPE_TYPES:
        raise fields.error("rope_scaling", f"must be of type {', '.join(ROPE_TYPES)}, got {kind!r}")
    fraction = parameters.pop("partial_rotary_factor", None) or fields.config.get("partial_rotary_factor") or 1.0
    needed = {"linear": ["factor"], "yarn": ["factor"]}.get(kind, [])
    if kind == "longrope":
        needed = ["short_factor", "long_factor", "original_max_position_embeddings"]
    if kind == "llama3":
        needed = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in needed if name not in parameters]
    if missing:
        raise fields.error("rope_scaling", f"of type {kind} must have {', '.join(missing)}")
    rotary_size = int(head_size * fraction)
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if len(parameters[name]) != rotary_size // 2:
            given = len(parameters[name])
            raise fields.error("rope_scaling", f"must have {rotary_size // 2} numbers as {name}, got {given}")
    return RopeConfig(float(theta), rotary_size, kind, parameters, max_position)


def _eos_token_ids(config: dict[str, Any], generation_config: dict[str, Any], vocab_size: int) -> frozenset[int]:
    """Ids without a logit (-1, or one that only the tokenizer has) are left out: they are never drawn."""
    ids: set[int] = set()
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def parse_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]
