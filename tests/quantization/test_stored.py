"""What a checkpoint's `quantization_config` means for each layer; nothing of it is passed over."""

import pytest
import torch

from vllm_triton.errors import ModelError
from vllm_triton.quantization.schemes import Int4Layout, Int4Scheme, LayerKind, QuantKey, ScaledScheme, Sharing
from vllm_triton.quantization.stored import stored_schemes

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.down_proj", "lm_head"
ROUTER = "model.layers.0.mlp.gate"
FP8 = torch.float8_e4m3fn


def _key(dtype, sharing, is_static=False):
    return QuantKey(dtype, Sharing(sharing), is_static)


def _held(config):
    schemes = stored_schemes(config, "here")
    assert schemes("model.embed_tokens", LayerKind.EMBEDDING) is None
    kinds = {Q: LayerKind.LINEAR, DOWN: LayerKind.LINEAR, ROUTER: LayerKind.ROUTER, HEAD: LayerKind.HEAD}
    found = {name: schemes(name, kind) for name, kind in kinds.items()}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.1}
FP8_STORED = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    "config, expected",
    [
        (AWQ, Int4Scheme(Int4Layout.AWQ, 128, True, False)),
        (GPTQ, Int4Scheme(Int4Layout.GPTQ, 128, True, False)),
        (
            GPTQ | {"desc_act": True, "group_size": -1, "checkpoint_format": "gptq_v2"},
            Int4Scheme(Int4Layout.GPTQ_V2, None, True, True),
        ),
        (FP8_STORED, ScaledScheme(_key(FP8, "tensor"), _key(FP8, "row"), "weight_scale")),
        (
            FP8_STORED | {"activation_scheme": "static"},
            ScaledScheme(_key(FP8, "tensor"), _key(FP8, "tensor", True), "weight_scale"),
        ),
        (
            FP8_STORED | {"weight_block_size": [128, 128], "fmt": "e4m3"},
            ScaledScheme(_key(FP8, "block"), _key(FP8, "block"), "weight_scale_inv"),
        ),
    ],
)
def test_one_scheme_for_all_linear_layers(config, expected):
    assert _held(config) == {Q: expected, DOWN: expected}


def test_layers_that_are_left_out():
    assert list(_held(AWQ | {"modules_to_not_convert": ["down_proj"]})) == [Q]
    assert list(_held(FP8_STORED | {"ignored_layers": [Q, "lm_head"]})) == [DOWN]
    # A part of a path ends where a name does: layer 1 is not layer 10.
    assert list(_held(FP8_STORED | {"modules_to_not_convert": ["model.layers.1", "model.layers.0.self_attn"]})) == [
        DOWN
    ]
    assert list(_held(FP8_STORED | {"modules_to_not_convert": [r"model.layers.\d+.mlp"]})) == [Q]
    assert list(_held(FP8_STORED | {"modules_to_not_convert": ["model.layers.1."]})) == [Q, DOWN]
    assert list(_held(AWQ | {"modules_to_not_convert": ["self_attn", "10.mlp"]})) == []
    assert list(_held(GPTQ | {"lm_head": True})) == [Q, DOWN, HEAD]
    within = [["self_attn.k_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
    assert list(_held(GPTQ | {"modules_in_block_to_quantize": within, "lm_head": True})) == [Q, HEAD]


@pytest.mark.parametrize(
    "config",
    [
        AWQ | {"version": "GEMM", "lm_head": False, "sym": False, "desc_act": False, "checkpoint_format": "gemm"},
        GPTQ | {"is_marlin_format": False, "format": "gptq", "method": "gptq", "pack_impl": "cpu"},
        FP8_STORED | {"dequantize": False},
    ],
)
def test_fields_that_change_nothing(config):
    assert list(_held(config)) == [Q, DOWN]


def test_names_of_the_same_field():
    assert _held(GPTQ | {"format": "gptq_v2"})[Q].layout is Int4Layout.GPTQ_V2
    assert _held(GPTQ | {"checkpoint_format": "gptq_v2"})[Q].layout is Int4Layout.GPTQ_V2


def _args(kind, bits, strategy, **more):
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False} | more


def _compressed(weights, inputs=None, stored_format="pack-quantized", **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    silent = {"quantization_status": "compressed", "kv_cache_scheme": None, "sparsity_config": {}}
    named = {"quant_method": "compressed-tensors", "format": stored_format, "config_groups": {"group_0": group}}
    return named | {"ignore": ["lm_head", "re:.*mlp.gate$"]} | silent | more


DYNAMIC = {"dynamic": True}
ASYMMETRIC = {"dynamic": True, "symmetric": False}
KV = _args("float", 8, "tensor", group_size=None)
INT4 = _args("int", 4, "group", group_size=128, actorder=None, observer="minmax")


@pytest.mark.parametrize(
    "config, expected",
    [
        (_compressed(INT4), Int4Scheme(Int4Layout.COMPRESSED_TENSORS, 128, False, False)),
        (
            _compressed(INT4 | {"actorder": "group", "symmetric": False, "group_size": 64}),
            Int4Scheme(Int4Layout.COMPRESSED_TENSORS, 64, True, True),
        ),
        (
            _compressed(_args("int", 4, "channel", actorder="weight")),
            Int4Scheme(Int4Layout.COMPRESSED_TENSORS, None, False, False),
        ),
        (
            _compressed(_args("int", 8, "channel"), _args("int", 8, "token", **DYNAMIC), "int-quantized"),
            ScaledScheme(_key(torch.int8, "row"), _key(torch.int8, "row"), "weight_scale"),
        ),
        (
            _compressed(_args("float", 8, "tensor"), _args("float", 8, "tensor"), "naive-quantized"),
            ScaledScheme(_key(FP8, "tensor"), _key(FP8, "tensor", True), "weight_scale"),
        ),
        (
            _compressed(
                _args("float", 8, "block", block_structure=[128, 128]),
                _args("float", 8, "group", group_size=128, **DYNAMIC),
                "float-quantized",
            ),
            ScaledScheme(_key(FP8, "block"), _key(FP8, "block"), "weight_scale"),
        ),
    ],
)
def test_compressed_tensors(config, expected):
    assert _held(config) == {Q: expected, DOWN: expected}


def test_groups_of_compressed_tensors_have_targets():
    config = _compressed(INT4, ignore=[])
    groups = config["config_groups"]
    groups["group_0"]["targets"] = ["re:.*down_proj"]
    assert list(_held(config)) == [DOWN]
    inputs = _args("int", 8, "token", **DYNAMIC)
    groups["group_1"] = {"targets": ["Linear"], "weights": _args("int", 8, "channel"), "input_activations": inputs}
    groups["group_1"]["format"] = "int-quantized"
    held = _held(config)
    assert list(held) == [Q, DOWN, ROUTER, HEAD]
    assert isinstance(held[DOWN], Int4Scheme) and isinstance(held[Q], ScaledScheme)


def test_a_name_wins_over_patterns_and_those_over_the_class():
    channel, inputs = _args("float", 8, "channel"), _args("float", 8, "token", **DYNAMIC)
    static = _args("float", 8, "tensor")
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*mlp.*"], "weights": static, "input_activations": static},
        "group_2": {"targets": [DOWN], "weights": channel, "input_activations": inputs},
    }
    for number in (1, 2):
        groups[f"group_{number}"]["format"] = "float-quantized"
    held = _held(_compressed(INT4, stored_format="mixed-precision", config_groups=groups, ignore=[]))
    assert isinstance(held[Q], Int4Scheme) and isinstance(held[HEAD], Int4Scheme)
    assert held[DOWN].activation == _key(FP8, "row") and held[ROUTER].activation == _key(FP8, "tensor", True)


def _without(config, name):
    return {field: value for field, value in config.items() if field != name}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "mxfp4"}, "here: quantization_config: field quant_method must be one of awq, .* 'mxfp4'"),
        ("awq", "here: quantization_config must be an object with fields, got 'awq'"),
        (AWQ | {"bits": 8}, "field bits must be 4, got 8"),
        (AWQ | {"version": "gemv"}, "field version must be 'gemm' or 'GEMM', got 'gemv'"),
        (AWQ | {"zero_point": False}, "field zero_point must be True, got False"),
        (AWQ | {"group_size": 20}, "field group_size must be -1 or a multiple of 32, got 20"),
        (AWQ | {"scale_bits": 3}, "field scale_bits is not supported, got 3"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "field modules_to_not_convert must be a list of names"),
        (AWQ | {"lm_head": True}, "field lm_head must be False, got True"),
        (AWQ | {"quant_method": ["awq"]}, r"field quant_method must be one of .*, got \['awq'\]"),
        (FP8_STORED | {"ignored_layers": ["*lm_head"]}, r"field ignored_layers is not a regular expression \(nothing"),
        (FP8_STORED | {"weight_block_size": 128}, r"field weight_block_size must be \[128, 128\], got 128"),
        (FP8_STORED | {"dequantize": True}, "field dequantize must be False, got True"),
        (GPTQ | {"is_marlin_format": True}, "field is_marlin_format must be False, got True"),
        (GPTQ | {"modules_in_block_to_quantize": ["q"]}, "modules_in_block_to_quantize must be a list of lists"),
        (_compressed(INT4, ignore=["re:*x"]), "field ignore is not a regular expression"),
        (_without(GPTQ, "bits"), "field bits must be 4, got None"),
        (GPTQ | {"desc_act": 1}, "field desc_act must be False or True, got 1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "field checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "field dynamic is not supported"),
        (FP8_STORED | {"weight_block_size": [64, 64]}, r"field weight_block_size must be \[128, 128\], got \[64, 64\]"),
        (FP8_STORED | {"scale_fmt": "ue8m0"}, "field scale_fmt must be 'float', got 'ue8m0'"),
        (FP8_STORED | {"kv_cache_scheme": "static"}, "field kv_cache_scheme is not supported"),
        (
            FP8_STORED | {"weight_block_size": [128, 128], "activation_scheme": "static"},
            "field activation_scheme must be dynamic with weight_block_size",
        ),
        (_compressed(INT4, stored_format="marlin-24"), "field format must be 'pack-quantized' or"),
        (_compressed(INT4 | {"symmetric": None, "zeros": 2}), "group_0.weights: field zeros is not supported, got 2"),
        (_compressed(INT4 | {"group_size": None}), "group_0.weights: field group_size must be set"),
        (_compressed(INT4, {"num_bits": 8}), "group_0: field input_activations must be null"),
        (_compressed(_args("int", 8, "channel")), "group_0: field format must not be pack-quantized for weights of 8"),
        (
            _compressed(_args("int", 8, "channel"), stored_format="int-quantized"),
            "group_0: field input_activations must be set for weights of 8 bits, got null",
        ),
        (_compressed(_args("float", 4, "group")), "group_0.weights: field num_bits must be 8 for type float, got 4"),
        (_compressed(INT4, kv_cache_scheme=KV | {"dynamic": True}), "kv_cache_scheme: field dynamic must be False"),
        (_compressed(INT4, kv_cache_scheme=KV | {"type": "int"}), "kv_cache_scheme: field type must be 'float', got"),
        (_compressed(INT4, sparsity_config={"format": "sparse-24"}), "sparsity_config: field format must be 'dense'"),
        (_compressed(INT4, transform_config={"R1": {}}), "field transform_config is not supported"),
        (
            _compressed(_args("int", 8, "channel"), _args("int", 8, "token"), "int-quantized"),
            "input_activations: field strategy must be tensor unless dynamic is true, got 'token'",
        ),
        (
            _compressed(_args("int", 8, "channel"), _args("int", 8, "token", **ASYMMETRIC), "int-quantized"),
            "input_activations: field symmetric must be True, got False",
        ),
        (
            _compressed(_args("int", 8, "channel"), _args("float", 8, "token", **DYNAMIC), "int-quantized"),
            "field input_activations must have type and num_bits of the weights",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(config, message):
    with pytest.raises(ModelError, match=message):
        stored_schemes(config, "here")
