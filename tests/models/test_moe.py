"""Models with experts: what their configurations and checkpoints say, and what is wrong in them."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_tiny

from vllm_triton.errors import ModelError
from vllm_triton.loading import open_checkpoint
from vllm_triton.loading.weights import load_weights
from vllm_triton.models.config import ModelConfig, MoeConfig
from vllm_triton.models.llama import MLP, LlamaForCausalLM
from vllm_triton.models.moe import SparseMoe

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = MIXTRAL | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 16, "norm_topk_prob": True}


def _parse(config):
    return ModelConfig.from_hf(config, {}, "here")


def test_configurations_are_read():
    assert _parse(MIXTRAL).moe == MoeConfig(8, 2, 48, True, (True,) * 4)
    assert _parse(QWEN3_MOE).moe == MoeConfig(8, 2, 16, True, (True,) * 4)
    assert _parse(QWEN3_MOE | {"norm_topk_prob": False}).moe.renormalize is False
    assert _parse(QWEN3_MOE | {"num_experts": 6}).moe.num_experts == 6
    assert _parse(QWEN3_MOE | {"mlp_only_layers": [0, 3]}).moe.sparse_layers == (False, True, True, False)
    assert _parse(QWEN3_MOE | {"decoder_sparse_step": 2}).moe.sparse_layers == (False, True, False, True)
    assert _parse(QWEN3_MOE | {"architectures": ["Qwen3ForCausalLM"]}).moe is None
    assert _parse(MIXTRAL).layer_windows == (0,) * 4
    assert _parse(MIXTRAL | {"sliding_window": 9}).layer_windows == (9,) * 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts is missing"),
        (MIXTRAL | {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_local_experts=8, got 9"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act must be silu where layers have experts, got 'gelu'"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
        (QWEN3_MOE | {"mlp_only_layers": [4]}, r"mlp_only_layers must list layers from 0 to 3, got \[4\]"),
    ],
)
def test_a_wrong_configuration_is_named(config, message):
    with pytest.raises(ModelError, match=f"^here: config field {message}$"):
        _parse(config)


def _model_and_tensors(family, folder):
    make_tiny(family, folder)
    checkpoint = open_checkpoint(str(folder))
    config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config, checkpoint.source)
    return LlamaForCausalLM(config, 32), load_file(folder / "model.safetensors")


def test_layers_without_experts_are_dense(tmp_path):
    model, _ = _model_and_tensors("qwen3-moe", tmp_path)
    assert [type(layer.mlp) for layer in model.layers] == [SparseMoe, MLP, SparseMoe]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
        ("qwen3-moe", "model.layers.2.mlp.experts.5.up_proj.weight"),
    ],
)
def test_every_expert_finds_its_place_or_is_named(family, name, tmp_path):
    model, tensors = _model_and_tensors(family, tmp_path)
    load_weights(model, tensors.items(), "here")
    expert = int(name.split(".experts.")[1].split(".")[0])
    block = model.layers[int(name.split(".")[2])].mlp
    assert torch.equal(block.w1.weight[expert, tensors[name].shape[0] :], tensors[name])
    with pytest.raises(ModelError, match=rf"here: tensor {name} must have shape .*, got \[2, 3\]"):
        load_weights(model, (tensors | {name: torch.ones(2, 3)}).items(), "here")
    del tensors[name]
    with pytest.raises(ModelError, match=f"here: tensor {name} is missing"):
        load_weights(model, tensors.items(), "here")
