"""Every tensor of a checkpoint finds its place, or is named in the error."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, make_tiny

from vllm_triton.errors import ModelError
from vllm_triton.loading import open_checkpoint
from vllm_triton.loading.weights import fill_dummy_weights, load_weights
from vllm_triton.models.config import ModelConfig
from vllm_triton.models.registry import make_model

NAME = "model.layers.1.self_attn.k_proj.weight"
PACKED_NAME = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture
def parts(tmp_path):
    """A model without weights, and the tensors that fit it."""

    def make(family="qwen2-window"):
        make_tiny(family, tmp_path)
        checkpoint = open_checkpoint(str(tmp_path))
        config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config, checkpoint.source)
        return make_model(config, 32), load_file(tmp_path / "model.safetensors")

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_filled(parts, family):
    model, tensors = parts(family)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, tensors.items(), "here")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    attention = model.layers[1].self_attn
    keys = slice(attention.query_size, attention.query_size + attention.kv_size)
    expected = tensors[NAME] if NAME in tensors else tensors[PACKED_NAME][keys]
    [weight] = attention.qkv_proj.runs()
    assert torch.equal(weight.weight[keys], expected)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop(NAME), rf"here: tensor {NAME} is missing"),
        (lambda tensors: tensors.update({"model.extra.weight": torch.ones(1)}), "model.extra.weight has no place"),
        (lambda tensors: tensors.update({NAME: torch.ones(2, 3)}), rf"{NAME} must have shape \[16, 48\], got \[2, 3\]"),
    ],
)
def test_a_wrong_tensor_is_named(parts, change, message):
    model, tensors = parts()
    change(tensors)
    with pytest.raises(ModelError, match=message):
        load_weights(model, tensors.items(), "here")


def test_a_tensor_that_comes_twice_is_named(parts):
    model, tensors = parts()
    with pytest.raises(ModelError, match=f"{NAME} occurs twice"):
        load_weights(model, [*tensors.items(), (NAME, tensors[NAME])], "here")


def test_what_is_not_needed_is_passed_over(parts):
    model, tensors = parts("qwen2")  # its head is tied to the embedding
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"], "model.rotary_emb.inv_freq": torch.ones(4)}
    load_weights(model, (tensors | extra).items(), "here")


def test_dummy_weights_fill_every_parameter(parts):
    model, _ = parts()
    fill_dummy_weights(model, seed=3)
    assert 0.9 < model.norm.weight.mean() < 1.1 and model.embed_tokens.weight.abs().max() < 0.2
    first = model.embed_tokens.weight.clone()
    fill_dummy_weights(model, seed=3)
    assert torch.equal(model.embed_tokens.weight, first)
