"""Experts and the sum over them: without a map, with experts that nobody chose, and where memory must not be read."""

import pytest
import torch

from vllm_triton.ops import fused_moe, moe_sum
from vllm_triton.ops.fused_moe.kernel import select_config, select_cpu_config
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
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_shared_memory(num_tokens, itemsize):
    config = select_config(num_tokens, 8, 128, itemsize)
    for columns in (2 * config.gate_n, config.down_n):
        stage = (config.block_t + columns) * config.depth * itemsize
        assert stage * config.num_stages <= 64 * 1024
    assert min(config.block_t, config.gate_n, config.down_n, config.depth) >= 16


@pytest.mark.parametrize("num_experts, num_choices", [(128, 8), (8, 2), (4, 2), (60, 4), (6, 3)])
def test_kernels_differ_by_powers_of_two_of_the_tokens(num_experts, num_choices):
    """An engine compiles those of powers of two before it serves."""
    for select, last in ((select_config, 2), (select_cpu_config, 2048)):
        for num_tokens in range(1, 1025):
            above = 1 << (num_tokens - 1).bit_length()
            same = select(above, num_choices, num_experts, last)
            assert select(num_tokens, num_choices, num_experts, last) == same
