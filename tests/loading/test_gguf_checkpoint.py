"""GGUF files written here with the gguf package, read back by our code."""

import math

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_triton.errors import ModelError
from vllm_triton.loading import open_checkpoint
from vllm_triton.loading.gguf_checkpoint import unpermute_rows
from vllm_triton.loading.gguf_config import llama3_rope_scaling

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 4, 2, 8, 32, 64, 48
SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}


def model_arrays(architecture, rng):
    arrays = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    arrays |= {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()}
    if architecture == "qwen2":
        arrays |= {f"blk.0.{name}.bias": SHAPES[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    if architecture == "qwen3":
        arrays |= {f"blk.0.{name}_norm.weight": (HEAD_DIM,) for name in ("attn_q", "attn_k")}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in arrays.items()}


def write_gguf(path, architecture="qwen2", arrays=None, fields=None, dropped=(), kind=gguf.GGMLQuantizationType.F32):
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": 1,
        "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000.0,
    } | (fields or {})
    for name, value in values.items():
        if name in dropped:
            continue
        key = name if name.startswith(("tokenizer.", "split.")) else f"{architecture}.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    arrays = model_arrays(architecture, np.random.default_rng(0)) if arrays is None else arrays
    for name, array in arrays.items():
        if array.ndim == 2 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_is_in_hugging_face_form(tmp_path, architecture):
    write_gguf(tmp_path / "m.gguf", architecture, fields={"tokenizer.ggml.eos_token_id": 7})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.source == str(tmp_path / "m.gguf")
    assert checkpoint.config == {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "hidden_act": "silu",
        "rms_norm_eps": pytest.approx(1e-6),
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rope_theta": 1000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": architecture == "qwen2",
        "bos_token_id": None,
        "eos_token_id": 7,
    }


def test_head_size_window_and_end_tokens(tmp_path):
    fields = {
        "attention.key_length": 16,
        "attention.sliding_window": 64,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.eom_token_id": 3,
    }
    write_gguf(tmp_path / "m.gguf", "qwen3", fields=fields)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config["head_dim"] == 16
    assert checkpoint.config["sliding_window"] == 64
    assert checkpoint.generation_config == {"eos_token_id": [3, 4]}


def test_qwen2_tensors_keep_names_values_and_row_order(tmp_path):
    arrays = write_gguf(tmp_path / "m.gguf", "qwen2")
    tensors = dict(open_checkpoint(tmp_path / "m.gguf").tensors())
    assert len(tensors) == len(arrays)
    assert "lm_head.weight" not in tensors
    layer = "model.layers.0"
    for gguf_name, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_q.weight": f"{layer}.self_attn.q_proj.weight",
        "blk.0.attn_q.bias": f"{layer}.self_attn.q_proj.bias",
        "blk.0.attn_k.weight": f"{layer}.self_attn.k_proj.weight",
        "blk.0.attn_output.weight": f"{layer}.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": f"{layer}.post_attention_layernorm.weight",
        "blk.0.ffn_down.weight": f"{layer}.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(tensors[name].numpy(), arrays[gguf_name], err_msg=name)


def test_llama_query_and_key_rows_are_unpermuted(tmp_path):
    """Rope turns neighbouring pairs of llama's rows, and the two halves of a head in Hugging Face's order."""
    arrays = write_gguf(tmp_path / "m.gguf", "llama")
    tensors = dict(open_checkpoint(tmp_path / "m.gguf").tensors())
    for part, num_heads in {"q": HEADS, "k": KV_HEADS}.items():
        stored = arrays[f"blk.0.attn_{part}.weight"].reshape(num_heads, HEAD_DIM, HIDDEN)
        read = tensors[f"model.layers.0.self_attn.{part}_proj.weight"].numpy().reshape(num_heads, HEAD_DIM, HIDDEN)
        for pair in range(HEAD_DIM // 2):
            np.testing.assert_array_equal(read[:, pair], stored[:, 2 * pair])
            np.testing.assert_array_equal(read[:, HEAD_DIM // 2 + pair], stored[:, 2 * pair + 1])
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.v_proj.weight"].numpy(), arrays["blk.0.attn_v.weight"]
    )


@given(num_heads=st.integers(1, 6), half=st.integers(1, 5), trailing=st.sampled_from([(), (3,)]))
def test_unpermute_moves_whole_rows(num_heads, half, trailing):
    num_rows = num_heads * half * 2
    rows = np.arange(num_rows * math.prod(trailing)).reshape(num_rows, *trailing)
    moved = unpermute_rows(rows, num_heads)
    # The converter's own permutation, applied to the result, gives the stored rows back.
    permuted = moved.reshape(num_heads, 2, half, *trailing).swapaxes(1, 2).reshape(rows.shape)
    np.testing.assert_array_equal(permuted, rows)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_types_are_dequantised_to_writable_float32(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    arrays = write_gguf(tmp_path / "m.gguf", "qwen2", kind=kind)
    tensors = dict(open_checkpoint(tmp_path / "m.gguf").tensors())
    for gguf_name, name in {"ffn_up": "mlp.up_proj", "attn_q": "self_attn.q_proj"}.items():
        original = arrays[f"blk.0.{gguf_name}.weight"]
        expected = gguf.dequantize(gguf.quantize(original, kind), kind)
        tensor = tensors[f"model.layers.0.{name}.weight"]
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), expected)
    tensors["model.norm.weight"].add_(1)


def test_untied_head(tmp_path):
    arrays = model_arrays("qwen2", np.random.default_rng(1))
    arrays["output.weight"] = arrays["token_embd.weight"] + 1
    write_gguf(tmp_path / "m.gguf", "qwen2", arrays)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(dict(checkpoint.tensors())["lm_head.weight"].numpy(), arrays["output.weight"])


def llama3_factors(theta, head_dim, factor, low, high, original_length):
    """Divisors of the frequencies, from the definition of llama3's rope scaling."""
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        if wavelength < original_length / high:
            factors.append(1.0)
        elif wavelength > original_length / low:
            factors.append(factor)
        else:
            smooth = (original_length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@given(factor=st.sampled_from([4.0, 8.0, 32.0]), head_dim=st.sampled_from([64, 128]))
def test_llama3_rope_scaling_is_recovered(factor, head_dim):
    scaling = llama3_rope_scaling(llama3_factors(500000.0, head_dim, factor, 1, 4, 8192), 500000.0, head_dim)
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": pytest.approx(1, abs=1e-3),
        "high_freq_factor": pytest.approx(4, abs=1e-3),
        "original_max_position_embeddings": 8192,
    }


def test_llama3_rope_scaling_of_another_length_gives_the_same_frequencies():
    factors = llama3_factors(500000.0, 128, 8.0, 2, 5, 4096)
    scaling = llama3_rope_scaling(factors, 500000.0, 128)
    again = llama3_factors(
        500000.0, 128, scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"], 8192
    )
    np.testing.assert_allclose(again, factors, rtol=1e-4)


def test_rope_factors_tensor_goes_to_the_config(tmp_path):
    arrays = model_arrays("llama", np.random.default_rng(2))
    factors = np.ones(HEAD_DIM // 2, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", "llama", arrays | {"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config["rope_scaling"] is None
    assert not any("rope" in name for name, _ in checkpoint.tensors())
    factors[:] = [1, 7, 2, 9]
    write_gguf(tmp_path / "other.gguf", "llama", arrays | {"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        open_checkpoint(tmp_path / "other.gguf")


def test_rope_scaling_fields(tmp_path):
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    write_gguf(tmp_path / "m.gguf", fields=fields)
    assert open_checkpoint(tmp_path / "m.gguf").config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write_gguf(tmp_path / "bad.gguf", fields=fields | {"rope.scaling.type": "other"})
    with pytest.raises(ModelError, match=r"rope\.scaling\.type.*'other'.*none, linear, yarn"):
        open_checkpoint(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma2"}, r"'gemma2'; supported are llama, qwen2, qwen3"),
        ({"dropped": ["embedding_length"]}, r"lacks the GGUF field qwen2\.embedding_length"),
        ({"dropped": ["attention.layer_norm_rms_epsilon"]}, r"qwen2\.attention\.layer_norm_rms_epsilon"),
        ({"fields": {"expert_count": 8}}, "mixture of experts"),
        ({"fields": {"attention.head_count_kv": [1, 2]}}, r"head_count_kv.*differs between layers"),
        ({"fields": {"rope.dimension_count": 4}}, r"rope\.dimension_count.*must equal the head size 8"),
        ({"fields": {"attention.value_length": 4}}, r"attention\.value_length.*must equal the head size 8"),
        ({"fields": {"split.count": 3}}, "one of 3 splits.*--merge"),
        ({"arrays": {"output_norm.weight": np.ones(32, np.float32)}}, r"no tensor token_embd\.weight"),
        (
            {
                "arrays": {
                    "token_embd.weight": np.ones((48, 32), np.float32),
                    "blk.0.odd.weight": np.ones(1, np.float32),
                }
            },
            r"GGUF tensor blk\.0\.odd\.weight",
        ),
    ],
)
def test_unsupported_models_are_named(tmp_path, changes, message):
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def test_type_without_dequantisation_names_tensor_and_type(tmp_path):
    arrays = model_arrays("qwen2", np.random.default_rng(0))
    arrays["blk.0.ffn_up.weight"] = np.ones((INTERMEDIATE, HIDDEN), np.int8)
    write_gguf(tmp_path / "m.gguf", arrays=arrays)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*type I8.*Q8_0"):
        list(open_checkpoint(tmp_path / "m.gguf").tensors())


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_row_that_is_not_whole_blocks_is_named(tmp_path, kind):
    """The type of one tensor is changed in the file's table."""
    write_gguf(tmp_path / "m.gguf")
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    name = b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # behind the rank and two sizes
    content[place : place + 4] = int(gguf.GGMLQuantizationType[kind]).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=rf"ffn_up.*\[64, 32\].*positive multiple of 256, the block of {kind}"):
        open_checkpoint(tmp_path / "m.gguf")


def test_not_a_gguf_file(tmp_path):
    for content in (b"", b"GG", b"PK\x03\x04" * 20):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError, match="not a GGUF file"):
            open_checkpoint(tmp_path / "m.gguf")


@settings(max_examples=60, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_a_model_error(tmp_path_factory, fraction):
    folder = tmp_path_factory.getbasetemp() / "truncated"
    folder.mkdir(exist_ok=True)
    whole = folder / "whole.gguf"
    if not whole.exists():
        write_gguf(whole, fields={"tokenizer.ggml.tokens": ["a", "bc", "déf"]})
    content = whole.read_bytes()
    cut = folder / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * fraction)])
    with pytest.raises(ModelError, match=r"truncated|not a GGUF file"):
        open_checkpoint(cut)


def test_tensors_are_read_again_after_their_pages_were_let_go(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    first, again = dict(checkpoint.tensors()), dict(checkpoint.tensors())
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
