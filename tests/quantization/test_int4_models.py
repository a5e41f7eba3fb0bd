"""Models in 4 bits: from each format, the logits are those of a model that has the values which it stands for."""

import json
from pathlib import Path

import pytest
import torch
from int4_files import stored_tensors
from safetensors.torch import load_file, save_file
from tiny import make_tiny, prompt_logits

from vllm_triton import LLM
from vllm_triton.errors import ModelError
from vllm_triton.models.int4_weight import Int4Weight
from vllm_triton.ops.testing import assert_within_rounding
from vllm_triton.quantization.schemes import Int4Layout, Int4Scheme

PROMPT = [5, 120, 17, 3, 198, 0, 64, 8, 9, 10, 11, 77, 150, 31]
# Inputs of 192, 128 and 256 columns. Wider weights would blow up what float32 rounds, in any implementation.
SIZES = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 2} | {
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
FAMILY = "llama-yarn-bias"


def _compressed(size: int, symmetric: bool, **weights: str) -> dict:
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    args = {"num_bits": 4, "type": "int", "symmetric": symmetric} | strategy | weights
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    named = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return named | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _gptq(size: int, **fields: object) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": size} | fields


# name -> layout, group size, whether it has zeros and an order of columns, the configuration
METHODS = {
    "awq": ("awq", 32, True, False, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    "gptq": ("gptq", 64, True, False, _gptq(64, sym=False)),
    "gptq symmetric": ("gptq", 64, False, False, _gptq(64, sym=True)),
    "gptq act-order": ("gptq", 32, True, True, _gptq(32, sym=False, desc_act=True)),
    "gptq_v2": ("gptq_v2", -1, True, False, _gptq(-1, sym=False, checkpoint_format="gptq_v2")),
    "compressed": ("pack-quantized", 64, False, False, _compressed(64, True)),
    "compressed zeros": ("pack-quantized", 32, True, False, _compressed(32, False)),
    "compressed channel": ("pack-quantized", -1, False, False, _compressed(-1, True)),
    "compressed act-order": ("pack-quantized", 64, True, True, _compressed(64, False, actorder="group")),
}


def _quantize(model, folder: Path, method: str) -> None:
    """Rounds the model's linear layers but for the head, in place, and the checkpoint's."""
    layout, size, has_zeros, is_ordered, config = METHODS[method]
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.data
        depth = weight.shape[1]
        g_idx = torch.arange(depth) // (depth if size == -1 else size)
        if is_ordered:  # the same for layers of the same input
            g_idx = g_idx[torch.randperm(depth, generator=torch.Generator().manual_seed(depth))]
        num_groups = int(g_idx.max()) + 1
        scales = torch.stack([weight[:, g_idx == group].abs().amax(1) / 7 for group in range(num_groups)], 1).half()
        zeros = torch.randint(5, 12, scales.shape) if has_zeros else torch.full(scales.shape, 8)
        wide = scales.float()[:, g_idx]
        quants = ((weight / wide).round() + zeros[:, g_idx]).clamp(0, 15).long()
        weight.copy_((quants - zeros[:, g_idx]) * wide)
        del tensors[f"{name}.weight"]
        stored = stored_tensors(layout, quants, scales, zeros if has_zeros else None, g_idx if is_ordered else None)
        tensors |= {f"{name}.{ending}": tensor for ending, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(written))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setitem(make_tiny.__globals__, "_COMMON", make_tiny.__globals__["_COMMON"] | SIZES)
    return make_tiny(FAMILY, tmp_path)


def _llm(path, **settings):
    fixed = {"max_model_len": 64, "num_kv_blocks": 9, "skip_tokenizer_init": True, "dtype": "float32"}
    return LLM(str(path), **(fixed | settings))


@torch.no_grad()
def _reference_logits(model) -> torch.Tensor:
    return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_values(method, tiny, tmp_path):
    dense = _reference_logits(tiny)
    _quantize(tiny, tmp_path, method)
    llm = _llm(tmp_path)
    eager = _reference_logits(tiny)
    exact = _reference_logits(tiny.double())
    weights = [module for module in llm.core.runner.model.modules() if isinstance(module, Int4Weight)]
    assert len(weights) == 4 * SIZES["num_hidden_layers"]
    _, _, has_zeros, is_ordered, _ = METHODS[method]
    assert all((weight.zeros is not None) == has_zeros for weight in weights)
    assert all((weight.order is not None) == is_ordered for weight in weights)
    logits = prompt_logits(llm, PROMPT)
    assert_within_rounding(logits, exact, eager, what=f"logits of {method}")
    assert (logits - dense).abs().mean() > 100 * (logits - exact).abs().mean()


GATE = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("qweight", torch.zeros(24, 248).int(), rf"tensor {GATE}.qweight must have shape \[24, 256\], got \[24, 248\]"),
        ("qzeros", torch.zeros(6, 32), f"tensor {GATE}.qzeros must hold int32, got float32"),
        ("g_idx", (torch.arange(192) // 33).int(), "a weight of 4 bits that cannot be read: g_idx must have equally"),
        (
            "g_idx",
            (torch.arange(192) // 32).flip(0).int(),
            "which must have the same columns in each group: their g_idx",
        ),
        ("scales", None, f"tensor {GATE}.scales is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named(name, tensor, message, tiny, tmp_path):
    _quantize(tiny, tmp_path, "gptq act-order")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{GATE}.{name}"]
    save_file(tensors if tensor is None else tensors | {f"{GATE}.{name}": tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        _llm(tmp_path)


def test_columns_that_are_not_whole_groups_are_refused():
    with pytest.raises(
        ModelError, match="in groups of 128 columns must have a multiple of them, and groups of 32, got 192"
    ):
        Int4Weight([16], 192, Int4Scheme(Int4Layout.AWQ, 128, has_zeros=True, is_ordered=False))
    with pytest.raises(
        ModelError, match="groups of 80 columns must have a multiple of them, and groups of 32, got 80 columns"
    ):
        Int4Weight([16], 80, Int4Scheme(Int4Layout.AWQ, None, has_zeros=True, is_ordered=False))


def test_parts_of_any_sizes_of_which_some_have_zeros_and_other_scales():
    """One part's zeros are all 8, and left out."""
    sizes, scales_dtypes = [5, 20, 9], (torch.float16, torch.bfloat16, torch.float16)
    weight = Int4Weight(sizes, 64, Int4Scheme(Int4Layout.COMPRESSED_TENSORS, 32, has_zeros=True, is_ordered=False))
    dense = []
    for size, slots, dtype in zip(sizes, weight.slots(), scales_dtypes, strict=True):
        quants, scales = torch.randint(0, 16, (size, 64)), torch.rand(size, 2).to(dtype)
        zeros = torch.full((size, 2), 8) if size == 20 else torch.randint(0, 16, (size, 2))
        for name, tensor in stored_tensors("pack-quantized", quants, scales, zeros, None).items():
            slots[name].copy_(tensor)
        dense.append((quants - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1))
    assert str(weight).count("scales of torch.float32, zeros") == 1
    bias = weight.bias()
    bias[: sum(sizes)] = torch.randn(sum(sizes))
    out = weight.linear(torch.eye(64), bias)
    torch.testing.assert_close(out, torch.cat(dense).T + bias[: sum(sizes)])
