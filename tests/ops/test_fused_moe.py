"""Experts and the sum over them: without a map, with experts that nobody chose, and where memory must not be read."""

import itertools

import pytest
import torch

from vllm_triton.ops import fused_moe, moe_sum, scaled_mm, scaled_quant
from vllm_triton.ops.errors import OpError
from vllm_triton.ops.fused_moe.config import select_config, select_cpu_config
from vllm_triton.ops.platforms import triton_interprets
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK
from vllm_triton.ops.testing import make_inputs
from vllm_triton.ops.testing.tolerance import assert_within_rounding

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(fused_moe.implementations))


def _inputs(num_tokens, hidden=24, intermediate=16, num_experts=5, num_choices=2):
    x, w1 = torch.randn(num_tokens, hidden), torch.randn(num_experts, 2 * intermediate, hidden) / 5
    w2, weights = torch.randn(num_experts, hidden, intermediate) / 4, torch.rand(num_tokens, num_choices)
    ids = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :num_choices].int()
    return x, w1, w2, weights, ids


def _expected(x, w1, w2, weights, ids):
    """One product for each slot."""
    out = torch.zeros_like(x)
    for token, slots in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(*slots, strict=True):
            if expert >= 0:
                gate, up = (w1[expert] @ x[token]).chunk(2)
                out[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40, 200])
def test_without_a_map(implementation, num_tokens):
    inputs = _inputs(num_tokens)
    actual = fused_moe.implementations[implementation](*inputs, None)
    wide = [each.double() if each.is_floating_point() else each for each in inputs]
    assert_within_rounding(actual, _expected(*wide), _expected(*inputs))


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_clamped_activation_and_biases_of_gpt_oss(implementation, num_tokens, limit):
    x, w1, w2, weights, ids = _inputs(num_tokens)
    biases = torch.randn(5, 32), torch.randn(5, 24)

    def expected(x, w1, w2, weights, w1_bias, w2_bias):
        out = torch.zeros_like(x)
        for token, slots in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
            for weight, expert in zip(*slots, strict=True):
                gate, up = (w1[expert] @ x[token] + w1_bias[expert]).chunk(2)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                activation = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
                out[token] += weight * (w2[expert] @ activation + w2_bias[expert])
        return out

    inputs = (x, w1, w2, weights, *biases)
    actual = fused_moe.implementations[implementation](x, w1, w2, weights, ids, None, *biases, limit)
    assert_within_rounding(actual, expected(*(each.double() for each in inputs)), expected(*inputs))


def _quantized_inputs(num_tokens, kind, **different):
    """Of the op, by name. Args: kind: of QUANTIZED."""
    dims = {"E": 300, "I": 150, "X": 3, "Y": 4, "K": 2, "biases": 3, "settled": 1} | different
    return make_inputs(fused_moe.contract, dims | {"T": num_tokens, **kind}, torch.float32)


QUANTIZED = {
    "int8": {"quantized": 2},
    "int8 static": {"quantized": 2, "static": 3},
    "fp8": {"quantized": 1},
    "fp8 static": {"quantized": 1, "static": 3},
    "fp8 blocks": {"quantized": 1, "blocks": 1},
    "int8 blocks": {"quantized": 2, "blocks": 1},
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantised_experts_are_products_of_quantised_operands(implementation, num_tokens, kind):
    """By the public ops alone: x and activations through scaled_quant, and one product for each half of w1 and w2."""
    if "fp8" in kind and implementation == "triton" and triton_interprets():
        pytest.skip("Triton's interpreter does not round fp8 numbers; tests/triton_cpu/test_ops.py does it natively")
    inputs = _quantized_inputs(num_tokens, QUANTIZED[kind])
    actual = fused_moe.implementations[implementation](*inputs.values())
    x, w1, w2, weights, ids, expert_map, w1_bias, w2_bias, _, *scales = inputs.values()
    w1_scale, w2_scale, a1_scale, a2_scale = scales
    group_size = 128 if "blocks" in kind else -1

    def product(x, weight, scale, a_scale, bias):
        quantized = scaled_quant(x, w1.dtype, group_size if a_scale is None else 0, a_scale)
        return scaled_mm(quantized[0], weight, quantized[1], scale, torch.float32, bias)

    out = torch.zeros_like(x)
    with scaled_quant.using("reference"), scaled_mm.using("reference"):
        for token, choice in itertools.product(range(num_tokens), range(2)):
            place = expert_map[ids[token, choice]]
            if place >= 0:
                first = (each[place].chunk(2) for each in (w1, w1_scale, w1_bias))
                gate, up = (product(x[[token]], *part[:2], a1_scale, part[2]) for part in zip(*first, strict=True))
                activation = torch.nn.functional.silu(gate) * up
                result = product(activation, w2[place], w2_scale[place], a2_scale, w2_bias[place])
                out[token] += weights[token, choice] * result[0]
    torch.testing.assert_close(actual, out, rtol=1e-5, atol=1e-5 * out.abs().max().item())


@IMPLEMENTATIONS
def test_an_expert_may_have_one_scale_for_all(implementation):
    inputs = _quantized_inputs(20, QUANTIZED["fp8 static"])
    for name in ("w1_scale", "w2_scale"):
        inputs[name] = inputs[name][:, :1].expand_as(inputs[name])
    run = fused_moe.implementations[implementation]
    actual = run(*inputs.values())
    for name in ("w1_scale", "w2_scale"):
        inputs[name] = inputs[name].contiguous()
    assert torch.equal(actual, run(*inputs.values()))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("int8", {"w1_scale": None}, "w1_scale must be a tensor for weights of torch.int8, got None"),
        ("int8", {"w2_scale": torch.ones(3, 300, 2)}, r"w2_scale must have shape \[X, 300, 1\] or, for .*\[X, 3, 2\]"),
        ("int8", {"w1_scale": torch.ones(3, 3, 3)}, r"w1_scale must have shape \[X, 300, 1\] or, for .*\[X, 4, 3\]"),
        ("int8", {"w2": torch.ones(3, 300, 150)}, "w2 must have the dtype of w1, torch.int8, got torch.float32"),
        ("fp8 blocks", {"a2_scale": torch.ones(1)}, "a2_scale must be None where w2_scale is of blocks, got a tensor"),
        (None, {"a1_scale": torch.ones(1)}, "a1_scale must be None for weights of torch.float32, got a tensor"),
        (None, {"w1": torch.ones(3, 300, 300).half()}, "w1 must have the dtype of x, torch.float32, or a quantized"),
    ],
)
def test_operands_that_do_not_go_together_are_named(kind, change, message):
    inputs = _quantized_inputs(2, QUANTIZED[kind] if kind else {}) | change
    if "w1" in change:
        inputs["w2"] = inputs["w2"].to(change["w1"].dtype)
    with pytest.raises(OpError, match=f"fused_moe: {message}"):
        fused_moe(*inputs.values())


@IMPLEMENTATIONS
def test_all_tokens_choose_one_expert(implementation):
    """Its blocks are as many as there can be, and weights of the others are not read."""
    x, w1, w2, weights, ids = _inputs(150, num_choices=1)
    ids[:] = 3
    for weight in (w1, w2):
        weight[:3], weight[4:] = float("nan"), float("nan")
    actual = fused_moe.implementations[implementation](x, w1, w2, weights, ids, None)
    torch.testing.assert_close(actual, _expected(x, w1, w2, weights, ids), rtol=1e-4, atol=1e-5)


@IMPLEMENTATIONS
def test_tokens_whose_experts_are_all_absent_give_zero(implementation):
    x, w1, w2, weights, _ = _inputs(3, num_experts=1)
    ids, expert_map = torch.tensor([[0, 1], [2, 0], [-1, -1]], dtype=torch.int32), torch.tensor([-1, 0, -1]).int()
    actual = fused_moe.implementations[implementation](x, w1, w2, weights, ids, expert_map)
    local = torch.tensor([[-1, 0], [-1, -1], [-1, -1]])
    torch.testing.assert_close(actual, _expected(x, w1, w2, weights, local), rtol=1e-4, atol=1e-5)
    assert actual[0].any() and not actual[1:].any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("limit", [0.0, 7.0])
def test_a_token_of_nan_leaves_the_others_alone(implementation, limit):
    inputs, more = _inputs(9), (None, None, None, limit)
    clean = fused_moe.implementations[implementation](*inputs, *more)
    inputs[0][4] = float("nan")
    spoilt = fused_moe.implementations[implementation](*inputs, *more)
    others = [token for token in range(9) if token != 4]
    assert spoilt[4].isnan().all()
    torch.testing.assert_close(spoilt[others], clean[others])


@pytest.mark.parametrize("implementation", list(moe_sum.implementations))
def test_sum_of_all_where_no_map_says_otherwise(implementation):
    x, ids = torch.randint(-9, 9, (5, 3, 17)).float(), torch.tensor([[0, 7, 2]] * 5).int()
    assert torch.equal(moe_sum.implementations[implementation](x, ids, None), x.sum(dim=1))


@pytest.mark.parametrize("num_tokens", [1, 16, 100, 512, 8192])
@pytest.mark.parametrize(("itemsize", "blocks"), [(1, False), (1, True), (2, False), (4, False)])
def test_tiles_fit_shared_memory(num_tokens, itemsize, blocks):
    config = select_config(num_tokens, 8, 128, itemsize, blocks)
    for columns in (2 * config.gate_n, config.down_n):
        stage = (config.block_t + columns) * config.depth * itemsize
        assert stage * config.num_stages <= 64 * 1024
    assert min(config.block_t, config.gate_n, config.down_n, config.depth) >= 16
    assert not blocks or SCALE_BLOCK % config.depth == 0


@pytest.mark.parametrize("num_experts, num_choices", [(128, 8), (8, 2), (4, 2), (60, 4), (6, 3)])
def test_kernels_differ_by_powers_of_two_of_the_tokens(num_experts, num_choices):
    """An engine compiles those of powers of two before it serves."""
    for select, last in ((select_config, 2), (select_cpu_config, 2048)):
        for num_tokens in range(1, 1025):
            above = 1 << (num_tokens - 1).bit_length()
            same = select(above, num_choices, num_experts, last)
            assert select(num_tokens, num_choices, num_experts, last) == same
