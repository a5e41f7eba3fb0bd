"""Experts in int8 and fp8: each scale with its own weight, from a checkpoint's tensors and from rounded ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny, prompt_logits

from vllm_triton import LLM
from vllm_triton.errors import ConfigError, ModelError
from vllm_triton.models.moe import SparseMoe

PROMPT = [5, 120, 17, 3, 198, 64, 8, 9, 10, 11, 77, 150, 31]
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
# Settings -> dtype, rows and columns that share a scale.
METHODS = {
    "int8_per_channel": (torch.int8, (1, 10**6)),
    "fp8_per_channel": (torch.float8_e4m3fn, (1, 10**6)),
    "fp8_per_tensor": (torch.float8_e4m3fn, (10**6, 10**6)),
    "fp8_block": (torch.float8_e4m3fn, (128, 128)),
}
# Of logits, by their deviation: experts in another order, or another's scales, are off by 1 and more.
MOST_ERROR = {torch.int8: 0.1, torch.float8_e4m3fn: 0.3}
SIZES = {"hidden_size": 160, "moe_intermediate_size": 136, "intermediate_size": 128}


@pytest.fixture
def dense(tmp_path, monkeypatch):
    """Of Qwen3-MoE, whose blocks have a rest: the weights that a checkpoint holds."""
    name, different = make_tiny.__globals__["FAMILIES"]["qwen3-moe"]
    monkeypatch.setitem(make_tiny.__globals__["FAMILIES"], "qwen3-moe", (name, different | SIZES))
    make_tiny("qwen3-moe", tmp_path)
    return load_file(tmp_path / "model.safetensors")


def _llm(path, **settings):
    return LLM(str(path), max_model_len=64, num_kv_blocks=9, skip_tokenizer_init=True, dtype="float32", **settings)


def _layers(llm):
    found = {number: layer.mlp for number, layer in enumerate(llm.core.runner.model.layers)}
    return {number: mlp for number, mlp in found.items() if isinstance(mlp, SparseMoe)}


def _values(weight, expert: int, num_parts: int, block: tuple[int, int]) -> list[torch.Tensor]:
    """Of each part of an expert, its values times their scales, with the scale found by row and column."""
    parts = []
    scales = weight.weight_scale[expert].chunk(num_parts)
    for values, scale in zip(weight.weight[expert].float().chunk(num_parts), scales, strict=True):
        rows, columns = (torch.arange(size) for size in values.shape)
        is_block = block == (128, 128)
        index = (rows // 128 if is_block else rows)[:, None], (columns // 128 if is_block else columns * 0)[None, :]
        parts.append(values * scale[index])
    return parts


@pytest.mark.parametrize("method", METHODS)
def test_each_expert_is_its_checkpoint_s_rounded(method, dense, tmp_path):
    dtype, block = METHODS[method]
    plain = prompt_logits(_llm(tmp_path), PROMPT)
    llm = _llm(tmp_path, quantization_config={"moe": method})
    assert list(_layers(llm)) == [0, 2]
    for number, mlp in _layers(llm).items():
        assert mlp.w1.weight.dtype == mlp.w2.weight.dtype == dtype
        for expert in range(len(mlp.w1.weight)):
            found = [*_values(mlp.w1, expert, 2, block), *_values(mlp.w2, expert, 1, block)]
            for name, values in zip(("gate_proj", "up_proj", "down_proj"), found, strict=True):
                expected = dense[f"model.layers.{number}.mlp.experts.{expert}.{name}.weight"]
                # Half a step of int8, or of fp8 with its 3 bits behind the point.
                step = expected.abs().max() / 254 if dtype == torch.int8 else expected.abs() / 16 + 1e-3
                assert ((values - expected).abs() <= step * 1.001).all(), (number, expert, name)
    error = (prompt_logits(llm, PROMPT) - plain).std() / plain.std()
    assert 1e-4 < error < MOST_ERROR[dtype]


def _store(folder, dense, dtype, ignore=()):
    """The experts' weights per channel as compressed-tensors has them, other layers as they are."""
    tensors = dict(dense)
    for name, weight in dense.items():
        if ".experts." in name and name not in ignore:
            scale = weight.abs().amax(1, keepdim=True) / torch.tensor(float(LARGEST[dtype]))
            values = weight / scale
            tensors[name] = (values.round() if dtype == torch.int8 else values).to(dtype)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    kind = {"num_bits": 8, "type": "int" if dtype == torch.int8 else "float", "symmetric": True}
    weights, inputs = kind | {"strategy": "channel"}, kind | {"strategy": "token", "dynamic": True}
    group = {"targets": [r"re:.*\.experts\.\d+\.\w+_proj$"], "weights": weights, "input_activations": inputs}
    named = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {"group_0": group}}
    ignored = [name.removesuffix(".weight") for name in ignore]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": named | {"ignore": ignored}}))


@pytest.mark.parametrize("dtype", LARGEST)
def test_stored_experts_are_those_rounded_at_load(dtype, dense, tmp_path):
    method = "int8_per_channel" if dtype == torch.int8 else "fp8_per_channel"
    config = {"moe": method, "targets": {"re:.*self_attn": "none"}}
    online = _llm(tmp_path, quantization_config=config)
    _store(tmp_path, dense, dtype)
    stored = _llm(tmp_path)
    for one, other in zip(_layers(online).values(), _layers(stored).values(), strict=True):
        for name, values in one.named_parameters():
            assert torch.equal(values.float(), other.get_parameter(name).float()), name
    assert torch.equal(prompt_logits(online, PROMPT), prompt_logits(stored, PROMPT))


def test_experts_are_held_alike(dense, tmp_path):
    _store(tmp_path, dense, torch.int8, ignore=["model.layers.2.mlp.experts.3.up_proj.weight"])
    with pytest.raises(
        ModelError,
        match=r"quantized alike, or all be ignored, got model.layers.2.mlp.experts.0.gate_proj as int8 per row, .* and "
        r"model.layers.2.mlp.experts.3.up_proj as full precision",
    ):
        _llm(tmp_path)


def test_experts_are_one_layer_of_the_settings(dense, tmp_path):
    config = {"targets": {"model.layers.2.mlp.experts": "none"}}
    first, second = _layers(_llm(tmp_path, quantization="int8_per_channel", quantization_config=config)).values()
    assert (first.w1.weight.dtype, second.w1.weight.dtype) == (torch.int8, torch.float32)
    with pytest.raises(ConfigError, match=r"no layer of this model matches 'model.layers.1.mlp.experts'"):
        _llm(tmp_path, quantization_config={"ignore": ["model.layers.1.mlp.experts"]})
    with pytest.raises(ConfigError, match=r"no layer of this model matches .* model.layers.0.mlp.experts"):
        _llm(tmp_path, quantization_config={"ignore": ["nothing"]})


def test_gpt_oss_is_rounded_at_load(tmp_path):
    """Its checkpoint holds all experts of a layer as one tensor, and gate and up by turns."""
    make_tiny("gpt-oss", tmp_path)
    plain = prompt_logits(_llm(tmp_path), PROMPT)
    llm = _llm(tmp_path, quantization_config={"moe": "int8_per_channel"})
    error = (prompt_logits(llm, PROMPT) - plain).std() / plain.std()
    assert 1e-4 < error < MOST_ERROR[torch.int8]


def test_stored_experts_of_gpt_oss_are_refused(tmp_path):
    make_tiny("gpt-oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"layers.0.mlp.experts must be stored in full precision for gpt-oss, and can"):
        _llm(tmp_path)
