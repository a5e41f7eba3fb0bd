"""What config.json says of a model: files as their authors publish them, and what is refused by name."""

import pytest

from vllm_triton.errors import ModelError
from vllm_triton.models.config import ARCHITECTURES, ModelConfig, MoeConfig
from vllm_triton.models.registry import DECODERS
from vllm_triton.models.rope import cos_sin_table

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "vocab_size": 32064,
}


def _read(config: dict, **different) -> ModelConfig:
    return ModelConfig.from_hf(config | different, {}, "config.json")


def test_every_architecture_has_a_decoder():
    assert set(DECODERS) == set(ARCHITECTURES)


def test_gemma3_as_published():
    config = _read(GEMMA3)
    assert config.layer_windows == ((512,) * 5 + (0,)) * 4 + (512,) * 2
    assert (config.rope.theta, config.local_rope.theta, config.rope.rotary_size) == (1e6, 1e4, 256)
    assert config.attention_scale == 1 / 16
    assert config.activation == "gelu_pytorch_tanh"
    assert config.tie_word_embeddings and config.qk_norm and not config.qkv_bias
    assert config.eos_token_ids == {1, 106}


def test_gemma3_scales_the_angles_of_layers_without_a_window_alone():
    config = _read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (config.rope.kind, config.rope.theta) == ("linear", 1e6)
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 1e4)


def test_gemma2_has_bounds_and_alternates_unless_the_file_says_otherwise():
    common = {key: value for key, value in GEMMA3.items() if "softcapping" not in key and not key.startswith("rope")}
    config = _read(common, architectures=["Gemma2ForCausalLM"])
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.layer_windows == (512, 0) * 13
    assert (config.rope.theta, config.local_rope, config.qk_norm) == (1e4, None, False)
    uncapped = _read(common, architectures=["Gemma2ForCausalLM"], final_logit_softcapping=None)
    assert (uncapped.attention_softcap, uncapped.final_softcap) == (50.0, 0.0)


def test_phi3_as_published():
    config = _read(PHI3)
    assert config.layer_windows == (0,) * 32
    assert _read(PHI3, sliding_window=2047).layer_windows == (2047,) * 32
    assert config.fused_projections and not config.tie_word_embeddings
    assert (config.rope.kind, config.rope.rotary_size) == ("longrope", 96)
    assert config.local_rope is None


def test_gpt_oss_as_published():
    config = _read(GPT_OSS)
    assert config.layer_windows == (128, 0) * 12
    assert config.moe == MoeConfig(32, 4, 2880, True, (True,) * 24, bias=True, swiglu_limit=7.0)
    assert (config.head_size, config.attention_scale) == (64, 1 / 8)
    assert config.attention_sinks and config.qkv_bias and config.output_bias
    assert (config.rope.kind, config.rope.theta, config.rope.parameters["truncate"]) == ("yarn", 150000.0, False)
    names = ("layer_types", "head_dim", "attention_bias", "rope_theta", "sliding_window", "swiglu_limit")
    assert _read({name: value for name, value in GPT_OSS.items() if name not in names}) == config


def test_longrope_has_long_factors_for_an_engine_of_long_texts():
    rope = _read(PHI3).rope
    short, long = (cos_sin_table(rope, length)[:4096] for length in (4096, 4097))
    scale = (1 + 5 / 12) ** 0.5  # 131072 is 2^5 times 4096 = 2^12
    assert short[0, 0].item() == pytest.approx(scale) and long[0, 0].item() == pytest.approx(scale)
    # Divided by two, each angle comes twice as late.
    assert (long[0::2] - short[:2048]).abs().max() < 1e-3


def test_phi4_turns_a_part_of_each_head():
    factors = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
    config = _read(
        PHI3, num_attention_heads=24, num_key_value_heads=8, partial_rotary_factor=0.75, rope_scaling=factors
    )
    assert (config.head_size, config.rope.rotary_size) == (128, 96)


@pytest.mark.parametrize(
    ("config", "different", "message"),
    [
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (GEMMA3, {"hidden_activation": "relu"}, "hidden_activation must be one of silu, gelu, .*, got 'relu'"),
        (GEMMA3, {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping must be a positive number, got -50.0"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, got 0"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types must name sliding_attention or full_attention per"),
        (GPT_OSS, {"swiglu_alpha": 1.5}, "swiglu_alpha must be 1.702, got 1.5"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit must be a positive number, got 0"),
        (GPT_OSS, {"rope_scaling": None}, "rope_scaling is missing"),
        (PHI3, {"hidden_act": "relu"}, "hidden_act must be one of silu, gelu, .*, got 'relu'"),
        (PHI3, {"partial_rotary_factor": 0.75}, "rope_scaling must have 36 numbers as short_factor, got 48"),
        (PHI3, {"rope_scaling": {"type": "su"}}, "rope_scaling of type longrope must have short_factor, long_factor"),
        (
            PHI3,
            {"original_max_position_embeddings": None},
            "rope_scaling of type longrope must have original_max_position_embeddings",
        ),
        (PHI3, {"architectures": ["PhiForCausalLM"]}, "architectures must name one of Gemma2ForCausalLM, "),
    ],
)
def test_what_is_refused_is_named(config, different, message):
    with pytest.raises(ModelError, match=rf"^config\.json: config field {message}"):
        _read(config, **different)
