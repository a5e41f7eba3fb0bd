"""`--quantization` and `--quantization-config`: which layer is quantized, and how."""

import pytest
import torch
from tiny import make_tiny

from vllm_triton import LLM
from vllm_triton.errors import ConfigError
from vllm_triton.models.layers import DenseWeight
from vllm_triton.models.scaled_weight import ScaledWeight
from vllm_triton.quantization.online import ONLINE, OnlineSchemes
from vllm_triton.quantization.schemes import LayerKind, Sharing

Q0, DOWN0, DOWN1 = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
EXPERTS, ROUTER = "model.layers.2.mlp.experts", "model.layers.2.mlp.gate"
LAYERS = (Q0, DOWN0, DOWN1)
KINDS = {
    **dict.fromkeys(LAYERS, LayerKind.LINEAR),
    EXPERTS: LayerKind.EXPERTS,
    ROUTER: LayerKind.ROUTER,
    "model.embed_tokens": LayerKind.EMBEDDING,
    "lm_head": LayerKind.HEAD,
}

INT8, FP8 = ONLINE["int8_per_channel"], ONLINE["fp8_per_tensor"]


def _quantized(quantization, config):
    schemes = OnlineSchemes(quantization, config)
    found = {name: schemes(name, kind) for name, kind in KINDS.items()}
    schemes.check_used()
    return {name: scheme for name, scheme in found.items() if scheme is not None}


@pytest.mark.parametrize(
    "quantization, config, expected",
    [
        (None, {}, {}),
        ("int8_per_channel", {}, dict.fromkeys((*LAYERS, EXPERTS), INT8)),
        ("int8_per_channel", {"moe": "none"}, dict.fromkeys(LAYERS, INT8)),
        (None, {"linear": "fp8_per_tensor", "moe": "int8_per_channel"},
         dict.fromkeys(LAYERS, FP8) | {EXPERTS: INT8}),
        ("int8_per_channel", {"ignore": ["re:.*down_proj", EXPERTS]}, {Q0: INT8}),
        ("int8_per_channel", {"ignore": ["*.0.*"]}, dict.fromkeys((DOWN1, EXPERTS), INT8)),
        # A name wins over a pattern, and of patterns the first.
        (None, {"targets": {"*": "int8_per_channel", "lm_head": "none"}}, dict.fromkeys((*LAYERS, EXPERTS), INT8)),
        (None, {"targets": {"*down*": "none", "*.layers.*": "int8_per_channel", DOWN1: "fp8_per_tensor"}},
         {Q0: INT8, EXPERTS: INT8, DOWN1: FP8}),
        (None, {"targets": {"*.q_proj": "fp8_per_tensor", "*proj": "int8_per_channel"}},
         {Q0: FP8, DOWN0: INT8, DOWN1: INT8}),
        ("int8_per_channel", {"targets": {"*": "fp8_per_tensor"}, "ignore": ["*layers*"]}, {"lm_head": FP8}),
        # Neither the router nor the embedding by the way.
        (None, {"targets": {"re:.*": "int8_per_channel"}}, dict.fromkeys((*LAYERS, EXPERTS, "lm_head"), INT8)),
        (None, {"targets": {ROUTER: "int8_per_channel"}}, {ROUTER: INT8}),
    ],
)  # fmt: skip
def test_which_layers_are_quantized(quantization, config, expected):
    assert _quantized(quantization, config) == expected


@pytest.mark.parametrize(
    "config, message",
    [
        ({"ignore": ["*.k_proj"]}, r"no layer of this model matches '\*.k_proj'; they are named as model.layers.0"),
        ({"targets": {"re:layers": "int8_per_channel", Q0: "none"}}, "no layer of this model matches 're:layers'"),
        ({"targets": {Q0 + ".weight": "int8_per_channel"}}, "no layer of this model matches"),
        ({"targets": {Q0: "int7"}}, f"target '{Q0}' must be one of none, fp8_per_tensor, .*, got 'int7'"),
        ({"linear": ["int8_per_channel"]}, "field linear must be one of none, .*, got"),
        ({"linear": None}, "field linear must be one of none, .*, got None"),
        ({"targets": {"re:(": "none"}}, r"a layer is not a regular expression \(.*\), got 're:\('"),
        ({"ignore": [3]}, "a layer must be a layer's name, re: and a regular expression, or a glob, got 3"),
        ({"ignore": "lm_head"}, "ignore must be a list"),
        ({"target": {}}, "must have the fields linear, moe, ignore or targets, got 'target'"),
        ({"targets": {"model.embed_tokens": "int8_per_channel"}}, "model.embed_tokens is an embedding, which stays"),
    ],
)
def test_what_does_not_fit_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        _quantized("int8_per_channel", config)


def _llm(path, **settings):
    return LLM(str(path), max_model_len=64, num_kv_blocks=9, skip_tokenizer_init=True, dtype="float32", **settings)


def test_layers_of_a_model(tmp_path):
    make_tiny("llama3", tmp_path)
    config = {"ignore": ["model.layers.0.*"], "targets": {"*.1.self_attn.[kv]_proj": "fp8_per_channel"}}
    llm = _llm(tmp_path, quantization="int8_per_channel", quantization_config=config)
    first, second, third = llm.core.runner.model.layers
    assert all(isinstance(run, DenseWeight) for run in first.self_attn.qkv_proj.runs())
    held = [(run.scheme.weight.dtype, run.sizes) for run in second.self_attn.qkv_proj.runs()]
    assert held == [(torch.int8, [48]), (torch.float8_e4m3fn, [16, 16])]
    [third_qkv] = third.self_attn.qkv_proj.runs()
    assert isinstance(third_qkv, ScaledWeight) and third_qkv.scheme.weight.sharing is Sharing.ROW
    with pytest.raises(ConfigError, match=r"no layer of this model matches 'model\.layers\.3\.\*'"):
        _llm(tmp_path, quantization="int8_per_channel", quantization_config={"ignore": ["model.layers.3.*"]})


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"quantization": "awq"}, "quantization must not be awq for .*: its config.json has no quantization_config"),
        ({"quantization": "gguf", "quantization_config": {"ignore": []}}, "must be left out with quantization gguf"),
        ({"quantization_config": ["lm_head"]}, "quantization_config must be an object with fields"),
    ],
)
def test_settings_that_do_not_fit(settings, message, tmp_path):
    make_tiny("llama3", tmp_path)
    with pytest.raises(ConfigError, match=message):
        _llm(tmp_path, **settings)
