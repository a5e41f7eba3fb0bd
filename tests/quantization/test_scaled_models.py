"""Models in int8 and fp8: each layer gives what the formula says, from a checkpoint's weights and from rounded ones."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny, prompt_logits

from vllm_triton import LLM, SamplingParams
from vllm_triton.errors import ConfigError, ModelError
from vllm_triton.models.scaled_weight import ScaledWeight

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127, FP8: 448}
PROMPT = [5, 120, 17, 3, 198, 0, 64, 8, 9, 10, 11, 77, 150, 31]
INPUT_SCALE = 0.05


def _round(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = (values / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.round() if dtype == INT8 else values.to(dtype).to(values.dtype)


def _scales(values: torch.Tensor, height: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """One for every height x width of them, repeated for each."""
    out = torch.empty_like(values)
    for row in range(0, values.shape[0], height):
        for column in range(0, values.shape[1], width):
            block = (slice(row, row + height), slice(column, column + width))
            out[block] = (values[block].abs().max() / LARGEST[dtype]).clamp(min=2.0**-126)
    return out


class Rounded(torch.nn.Module):
    """A linear layer by its formula, in float64."""

    def __init__(self, weight, bias, dtype, block, is_static):
        super().__init__()
        self.dtype, self.is_static = dtype, is_static
        height, width = (min(size, most) for size, most in zip(block, weight.shape, strict=True))
        self.width = width
        self.scale = _scales(weight.double(), height, width, dtype).float().double()
        self.values = _round(weight.double(), self.scale, dtype)
        self.bias = bias

    def forward(self, x):
        rows = x.flatten(0, -2).double()
        scale = torch.full_like(rows, INPUT_SCALE) if self.is_static else _scales(rows, 1, self.width, self.dtype)
        scale = scale.float().double()
        out = (_round(rows, scale, self.dtype) * scale) @ (self.values * self.scale).T
        out = out.float() if self.bias is None else out.float() + self.bias
        return out.unflatten(0, x.shape[:-1])


# name -> dtype, rows and columns that share a scale of the weight, whether the activations' is stored
WHOLE = 10**6
METHODS = {
    "fp8_per_tensor": (FP8, (WHOLE, WHOLE), False),
    "fp8_per_channel": (FP8, (1, WHOLE), False),
    "fp8_block": (FP8, (128, 128), False),
    "int8_per_channel": (INT8, (1, WHOLE), False),
    "fp8 static": (FP8, (WHOLE, WHOLE), True),
    "int8 static": (INT8, (1, WHOLE), True),
}
ARGS = {"num_bits": 8, "symmetric": True}
CONFIGS = {
    "fp8_per_tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def _compressed(kind: str, strategy: str, is_static: bool) -> dict:
    inputs = ARGS | {"type": kind, "strategy": "tensor" if is_static else "token", "dynamic": not is_static}
    group = {"targets": ["Linear"], "weights": ARGS | {"type": kind, "strategy": strategy}, "input_activations": inputs}
    stored_format = {"int": "int-quantized", "float": "float-quantized"}[kind]
    named = {"quant_method": "compressed-tensors", "format": stored_format}
    return named | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


CONFIGS["int8_per_channel"] = _compressed("int", "channel", False)
CONFIGS["int8 static"] = _compressed("int", "channel", True)
CONFIGS["fp8_per_channel"] = _compressed("float", "channel", False)


def _round_layers(model, method: str) -> None:
    """Linear layers but for the head, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            model.set_submodule(name, Rounded(module.weight.data, module.bias, *METHODS[method]))


def _write_quantized(model, method: str, folder: Path) -> None:
    """In place of the checkpoint of full precision. Args: model: with rounded layers."""
    tensors = load_file(folder / "model.safetensors")
    _, block, is_static = METHODS[method]
    scale_name = "weight_scale_inv" if method == "fp8_block" else "weight_scale"
    for name, module in model.named_modules():
        if isinstance(module, Rounded):
            tensors[f"{name}.weight"] = module.values.to(module.dtype)
            scale = module.scale[:: block[0], :: block[1]].float().contiguous()
            tensors[f"{name}.{scale_name}"] = scale.reshape(1) if block == (WHOLE, WHOLE) else scale
            if is_static:
                # Of the parts of one product the largest counts.
                smaller = name.endswith(("k_proj", "up_proj"))
                tensors[f"{name}.input_scale"] = torch.tensor([INPUT_SCALE * (0.5 if smaller else 1)])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[method]}))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Sizes that blocks of 128 divide, and one that they do not."""
    monkeypatch.setitem(make_tiny.__globals__, "_COMMON", make_tiny.__globals__["_COMMON"] | SIZES)
    return functools.partial(make_tiny, folder=tmp_path)


# Queries of qwen3, which has heads of 20, are no multiple of 128.
SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 2}


def _llm(path, **settings):
    fixed = {"max_model_len": 64, "num_kv_blocks": 9, "skip_tokenizer_init": True, "dtype": "float32"}
    return LLM(str(path), **(fixed | settings))


def _reference_logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


def _assert_equal_but_for_ties(logits: torch.Tensor, expected: torch.Tensor, dense: torch.Tensor) -> None:
    """A value between two roundings may go either way, since sums before it round; that is far less than rounding all
    of them differently would be.
    """
    scale = (expected - dense).abs().mean()
    assert (logits - expected).abs().mean() < 0.1 * scale
    assert (logits - dense).abs().mean() > 0.5 * scale


@pytest.mark.parametrize("family", ["llama-yarn-bias", "qwen3", "phi3"])
@pytest.mark.parametrize("method", METHODS)
def test_logits_equal_the_formula_s(method, family, tiny, tmp_path):
    model = tiny(family)
    dense = _reference_logits(model)
    online = None if "static" in method else _llm(tmp_path, quantization=method)
    _round_layers(model, method)
    expected = _reference_logits(model)
    _write_quantized(model, method, tmp_path)
    stored = _llm(tmp_path)
    for llm in filter(None, (online, stored)):
        assert any(isinstance(module, ScaledWeight) for module in llm.core.runner.model.modules())
        _assert_equal_but_for_ties(prompt_logits(llm, PROMPT), expected, dense)
    if online is not None:
        for (name, one), (_, other) in zip(
            online.core.runner.model.named_parameters(), stored.core.runner.model.named_parameters(), strict=True
        ):
            steps = (one.float() - other.float()).abs()
            assert (steps > 0).float().mean() < 1e-3 and bool((steps <= other.float().abs() / 8 + 1).all()), name


def test_a_request_s_tokens_do_not_depend_on_its_neighbours(tiny, tmp_path):
    """Each token has a scale of its own."""
    tiny("qwen3")
    llm = _llm(tmp_path, quantization="int8_per_channel", max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT[start:]} for start in (0, 4, 9)]
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def _spoil(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name) if tensor is None else tensors.update({name: tensor})
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        (f"{Q}.weight", torch.zeros(40, 192), f"tensor {Q}.weight must hold int8, got float32"),
        (f"{Q}.weight_scale", torch.zeros(2, 1), rf"tensor {Q}.weight_scale must have shape \[40, 1\], got \[2, 1\]"),
        (f"{Q}.weight_scale", None, f"tensor {Q}.weight_scale is missing"),
        ("model.norm.weight", torch.ones(192, dtype=torch.int8), "tensor model.norm.weight must be of full precision"),
        (f"{Q}.weight_zero_point", torch.zeros(40, 1), f"tensor {Q}.weight_zero_point has no place in this model"),
    ],
)
def test_a_damaged_checkpoint_is_named(name, tensor, message, tiny, tmp_path):
    model = tiny("qwen3")
    _round_layers(model, "int8_per_channel")
    _write_quantized(model, "int8_per_channel", tmp_path)
    _spoil(tmp_path, name, tensor)
    with pytest.raises(ModelError, match=message):
        _llm(tmp_path)


def test_settings_against_a_quantized_checkpoint_and_what_it_may_hold(tiny, tmp_path):
    model = tiny("qwen3")
    _round_layers(model, "int8_per_channel")
    _write_quantized(model, "int8_per_channel", tmp_path)
    with pytest.raises(ConfigError, match=r"quantization_config must be left out for .* already, got "):
        _llm(tmp_path, quantization_config={"ignore": []})
    for settings in ({"quantization": "fp8_block"}, {"quantization": "none"}):
        with pytest.raises(ConfigError, match=r"quantization must be auto or compressed-tensors for .* already, got "):
            _llm(tmp_path, **settings)
    with pytest.raises(ConfigError, match=r"load_format must be auto for .*, got dummy"):
        _llm(tmp_path, load_format="dummy")
    _llm(tmp_path, quantization="compressed-tensors")
    # Some writers give every layer a bias; the configuration has had another name.
    down = "model.layers.0.mlp.down_proj.bias"
    _spoil(tmp_path, down, torch.zeros(192))
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    _llm(tmp_path)
    _spoil(tmp_path, down, torch.ones(192))
    with pytest.raises(ModelError, match=f"tensor {down} has no place in this model"):
        _llm(tmp_path)


def test_blocks_do_not_fit_any_size(tmp_path):
    make_tiny("llama3", tmp_path)
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.gate_proj must have a multiple of 128 rows .*, got 64"):
        _llm(tmp_path, quantization="fp8_block")
    _llm(tmp_path, quantization="fp8_per_tensor", load_format="dummy")


def test_scales_of_the_kv_cache(tiny, tmp_path):
    model = tiny("qwen3")
    _round_layers(model, "int8_per_channel")
    _write_quantized(model, "int8_per_channel", tmp_path)
    plain = prompt_logits(_llm(tmp_path), PROMPT)
    for layer in range(2):
        for name, scale in (("k_scale", torch.tensor(0.25 + layer)), ("v_scale", torch.tensor([0.5 + layer]))):
            _spoil(tmp_path, f"model.layers.{layer}.self_attn.{name}", scale)
    config = json.loads((tmp_path / "config.json").read_text())
    cached = ARGS | {"type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = cached
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(prompt_logits(_llm(tmp_path), PROMPT), plain)  # a cache of full precision needs none
    layers = _llm(tmp_path, kv_cache_dtype="fp8").core.runner.model.layers
    assert [(layer.self_attn.k_scale.tolist(), layer.self_attn.v_scale.tolist()) for layer in layers] == [
        ([0.25], [0.5]),
        ([1.25], [1.5]),
    ]
