"""GGUF weights that stay packed: the model is the one whose weights were dequantised."""

import logging

import pytest
import torch
from gguf_files import SHAPES, VOCAB, write_model
from tiny import make_tiny, prompt_logits

from vllm_triton import LLM, SamplingParams
from vllm_triton.errors import ConfigError
from vllm_triton.loading import find_demo_model
from vllm_triton.models.gguf_weight import GgufWeight
from vllm_triton.models.layers import DenseWeight
from vllm_triton.ops import registry
from vllm_triton.ops.testing import assert_within_rounding

Q4_K_M = dict.fromkeys(SHAPES, "Q4_K") | {"attn_v": "Q6_K", "ffn_down": "Q6_K"}
MODELS = {
    "Q4_0": [dict.fromkeys(SHAPES, "Q4_0")],
    "Q4_1, Q8_0": [dict.fromkeys(SHAPES, "Q4_1") | {"ffn_down": "Q8_0"}],
    "Q4_K_M": [Q4_K_M, dict.fromkeys(SHAPES, "Q4_K")],
    "some dense": [Q4_K_M | {"attn_k": "Q5_0", "ffn_up": "Q8_0"}, dict.fromkeys(SHAPES, "Q5_1") | {"attn_v": None}],
}
PROMPT = [5, 200, 17, 3, 299, 0, 64, 8, 9, 10, 11, 77, 150, 31]


def _llm(path, **settings):
    fixed = {"max_model_len": 64, "num_kv_blocks": 16, "max_num_seqs": 4, "skip_tokenizer_init": True}
    fixed |= {"max_num_batched_tokens": 32}  # natively, kernels compile for steps of every size up to it
    return LLM(str(path), **(fixed | settings))


def _num_bytes(llm):
    return sum(parameter.nbytes for parameter in llm.core.runner.model.parameters())


def _assert_same_model(path, prompt):
    """In bfloat16, one token alone and several at once, which different kernels serve."""
    exact, eager, packed = (
        _llm(path, dtype=dtype, quantization=quantization, optimization_level=0)  # forwards outside the engine's loop
        for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "gguf"))
    )
    for ids in (prompt, prompt[:1]):
        logits = [prompt_logits(llm, ids) for llm in (packed, exact, eager)]
        assert_within_rounding(*logits, what=f"logits of {len(ids)} tokens")
    return packed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_logits_equal_those_of_dequantised_weights(layers, bias, tmp_path):
    write_model(tmp_path / "m.gguf", layers, bias=bias)
    packed = _assert_same_model(tmp_path / "m.gguf", PROMPT)
    assert packed.core.model_config.vocab_size == VOCAB  # no multiple of the rows that lie interleaved


def test_float32_tokens_equal_those_of_dequantised_weights(tmp_path):
    write_model(tmp_path / "m.gguf", MODELS["Q4_K_M"])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (1, 5, 14)]
    tokens = []
    for quantization in ("none", "gguf"):
        llm = _llm(tmp_path / "m.gguf", dtype="float32", quantization=quantization)
        tokens.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert tokens[0] == tokens[1]


def test_the_demo_model_stays_as_small_as_its_file():
    packed = _assert_same_model(find_demo_model(), [504, 3575, 282, 4649, 314])
    assert _num_bytes(packed) < 97e6
    assert _num_bytes(_llm(find_demo_model(), dtype="bfloat16", quantization="none")) > 260e6


def test_neighbours_of_one_format_are_one_product(tmp_path):
    write_model(tmp_path / "m.gguf", MODELS["some dense"])
    layers = _llm(tmp_path / "m.gguf", dtype="float32", quantization="gguf").core.runner.model.layers
    kinds = [[(type(run), run.sizes) for run in layer.self_attn.qkv_proj.runs()] for layer in layers]
    assert kinds[0] == [(GgufWeight, [256]), (DenseWeight, [128]), (GgufWeight, [128])]
    assert kinds[1] == [(DenseWeight, [256, 128, 128])]
    assert [type(run) for run in layers[0].mlp.gate_up_proj.runs()] == [DenseWeight]  # gate and up differ


def test_what_has_no_packed_form_is_logged(tmp_path, caplog):
    write_model(tmp_path / "m.gguf", MODELS["some dense"])
    with caplog.at_level(logging.INFO, "vllm_triton"):
        _llm(tmp_path / "m.gguf", dtype="float32", quantization="gguf")
    assert "dequantised 10 weights: 1 of Q5_0, 1 of Q4_K, 1 of Q8_0, 6 of Q5_1, 1 of F32" in caplog.text


def test_a_folder_has_no_packed_weights(tmp_path):
    make_tiny("llama3", tmp_path)
    with pytest.raises(ConfigError, match=r"quantization must be auto or none for .*, got gguf"):
        _llm(tmp_path, quantization="gguf")
    with pytest.raises(ConfigError, match=r"quantization must be one of auto, none, gguf, .*, got 'q4'"):
        _llm(tmp_path, quantization="q4")


def test_without_a_kernel_weights_are_dequantised(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_frozen", None)
    for op in registry.OPS.values():
        monkeypatch.setattr(op, "_active", None)
    write_model(tmp_path / "m.gguf", MODELS["Q4_0"])
    llm = _llm(tmp_path / "m.gguf", dtype="float32", kernels={"gguf_mm": "torch"})
    assert not any(isinstance(module, GgufWeight) for module in llm.core.runner.model.modules())
    assert torch.isfinite(prompt_logits(llm, PROMPT)).all()
