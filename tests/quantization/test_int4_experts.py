"""Experts in 4 bits: from each format, the logits are those of a model that has the values which it stands for."""

import json
from pathlib import Path

import pytest
import torch
from int4_files import stored_tensors
from safetensors.torch import load_file, save_file
from tiny import make_tiny, prompt_logits

from vllm_triton import LLM
from vllm_triton.errors import ModelError
from vllm_triton.models.int4_weight import Int4ExpertWeight
from vllm_triton.ops.w4a16_mm.layout import dequantize
from vllm_triton.quantization.schemes import Int4Layout, Int4Scheme

DTYPES = (torch.float16, torch.float16, torch.bfloat16)
PROMPT = [5, 120, 17, 3, 198, 64, 8, 9, 10, 11, 77, 150, 31]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "intermediate_size": 128}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "channel"}
_GROUP = {"targets": [r"re:.*\.experts\.\d+\.\w+_proj$"], "weights": _WEIGHTS, "input_activations": None}
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": _GROUP}}
_SKIPPED = {"modules_to_not_convert": [r"model\.layers\.\d+\.self_attn", "model.layers.1.mlp", "lm_head"]}
# layout -> the group size, whether it has zeros, and the configuration
METHODS = {
    "awq": (32, True, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True} | _SKIPPED),
    "gptq": (32, False, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True} | _SKIPPED),
    "pack-quantized": (-1, True, _COMPRESSED),
}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    name, different = make_tiny.__globals__["FAMILIES"]["qwen3-moe"]
    monkeypatch.setitem(make_tiny.__globals__["FAMILIES"], "qwen3-moe", (name, different | SIZES))
    make_tiny("qwen3-moe", tmp_path)
    return load_file(tmp_path / "model.safetensors")


def _llm(path):
    return LLM(str(path), max_model_len=64, num_kv_blocks=9, skip_tokenizer_init=True, dtype="float32")


def _quantize(folder: Path, dense: dict, layout: str, g_idx_of=lambda name, depth: None) -> dict:
    """Rewrites the checkpoint, experts in 4 bits; returns the dense tensors that it stands for."""
    size, has_zeros, config = METHODS[layout]
    tensors, values = dict(dense), dict(dense)
    for name, weight in dense.items():
        if ".experts." not in name:
            continue
        depth = weight.shape[1]
        groups = weight.unflatten(1, (-1, depth if size == -1 else size))
        scales = (groups.abs().amax(2) / 7).half()
        zeros = torch.randint(5, 12, scales.shape) if has_zeros else torch.full(scales.shape, 8)
        quants = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15).long()
        values[name] = ((quants - zeros[..., None]) * scales.float()[..., None]).flatten(1)
        layer = name.removesuffix(".weight")
        stored = stored_tensors(layout, quants.flatten(1), scales, zeros if has_zeros else None, g_idx_of(layer, depth))
        del tensors[name]
        tensors |= {f"{layer}.{ending}": tensor for ending, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(written))
    return values


@pytest.mark.parametrize("layout", METHODS)
def test_logits_are_those_of_the_values(layout, tiny, tmp_path):
    original = prompt_logits(_llm(tmp_path), PROMPT)
    values = _quantize(tmp_path, tiny, layout)
    llm = _llm(tmp_path)
    found = [module for module in llm.core.runner.model.modules() if isinstance(module, Int4ExpertWeight)]
    assert len(found) == 4  # two of each of two layers
    assert all((weight.zeros is not None) == METHODS[layout][1] for weight in found)
    logits = prompt_logits(llm, PROMPT)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(values, tmp_path / "model.safetensors")
    expected = prompt_logits(_llm(tmp_path), PROMPT)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.std().item())
    assert (original - expected).std() > 100 * (logits - expected).std()


def test_an_order_of_columns_is_named(tiny, tmp_path):
    last = "model.layers.2.mlp.experts.5.down_proj"

    def g_idx_of(name, depth):
        return torch.arange(depth).flip(0) // 32 if name == last else None

    _quantize(tmp_path, tiny, "gptq", g_idx_of)
    with pytest.raises(ModelError, match=rf"tensor {last}\.\w+ completes an expert of 4 bits .*act-order.*desc_act"):
        _llm(tmp_path)


def test_experts_of_which_some_have_zeros_and_other_scales():
    """Of three experts the second alone has zeros, and the last has scales of another type."""
    weight = Int4ExpertWeight(3, (16, 16), 64, Int4Scheme(Int4Layout.COMPRESSED_TENSORS, 32, True, False))
    expected = []
    for expert, slots in enumerate(weight.slots()):
        parts = []
        for part in slots:
            quants, scales = torch.randint(0, 16, (16, 64)), torch.rand(16, 2).to(DTYPES[expert])
            zeros = torch.randint(0, 16, (16, 2)) if expert == 1 else torch.full((16, 2), 8)
            for name, tensor in stored_tensors("pack-quantized", quants, scales, zeros, None).items():
                part[name].copy_(tensor)
            parts.append((quants - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1))
        expected.append(torch.stack(parts, 1).flatten(0, 1))
        assert (weight.zeros is None) == (expert == 0)
    assert "scales of torch.float32, zeros" in str(weight)
    quants, scales, zeros = weight.operands()
    for expert, values in enumerate(expected):
        assert torch.equal(dequantize(quants[expert], scales[expert], zeros[expert], torch.float32), values)
