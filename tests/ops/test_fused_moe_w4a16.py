"""Experts in 4 bits: against a product for each slot by the projections' values, and where nothing may be read."""

import pytest
import torch

from vllm_triton.ops import fused_moe_w4a16
from vllm_triton.ops.errors import OpError
from vllm_triton.ops.fused_moe_w4a16.kernel import MOST_SLOTS_OF_FEW, select_packed_config
from vllm_triton.ops.testing import make_inputs
from vllm_triton.ops.testing.tolerance import assert_within_rounding
from vllm_triton.ops.w4a16_mm.kernel import FEW_TOKENS
from vllm_triton.ops.w4a16_mm.layout import pack

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(fused_moe_w4a16.implementations))
NUM_EXPERTS = 5


def _projection(num_rows, depth, group_size, has_zeros):
    """Of every expert: quants, scales and zeros as `pack` takes them, and the values that they stand for."""
    shape = (NUM_EXPERTS, num_rows, depth // group_size)
    quants, scales = torch.randint(0, 16, (*shape[:2], depth)), (torch.rand(shape) + 0.5) / 40
    zeros = torch.randint(0, 17, shape) if has_zeros else torch.full(shape, 8)
    values = (quants - zeros.repeat_interleave(group_size, 2)) * scales.repeat_interleave(group_size, 2)
    return (quants, scales, zeros if has_zeros else None), values


def _packed(parts):
    """One product of all experts. Args: parts: of which rows are taken by turns."""
    experts = []
    for expert in range(NUM_EXPERTS):
        columns = zip(*([None if each is None else each[expert] for each in part] for part in parts), strict=True)
        by_turns = [None if column[0] is None else torch.stack(column, 1).flatten(0, 1) for column in columns]
        experts.append(pack(*by_turns))
    return [None if column[0] is None else torch.stack(column) for column in zip(*experts, strict=True)]


def _layer(num_tokens, has_zeros=True, hidden=96, middle=64, groups=(32, 64), num_choices=2):
    """The op's arguments but for the map, and x, gate, up, down, weights and ids for `_expected`."""
    (gate, gate_values), (up, up_values) = (_projection(middle, hidden, groups[0], has_zeros) for _ in range(2))
    down, down_values = _projection(hidden, middle, groups[1], has_zeros)
    x, weights = torch.randn(num_tokens, hidden), torch.rand(num_tokens, num_choices)
    ids = torch.rand(num_tokens, NUM_EXPERTS).argsort(dim=1)[:, :num_choices].int()
    inputs = [x, *_packed([gate, up]), *_packed([down]), weights, ids]
    return inputs, (x, gate_values, up_values, down_values, weights, ids)


def _expected(x, gate, up, down, weights, ids):
    """A product for each slot."""
    out = torch.zeros_like(x)
    for token, slots in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(*slots, strict=True):
            if expert >= 0:
                activation = torch.nn.functional.silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
                out[token] += weight * (down[expert] @ activation)
    return out


@IMPLEMENTATIONS
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 40, 200])
def test_each_slot_is_a_product_by_its_expert_s_values(implementation, num_tokens, has_zeros):
    inputs, parts = _layer(num_tokens, has_zeros)
    actual = fused_moe_w4a16.implementations[implementation](*inputs, None)
    wide = [each.double() if each.is_floating_point() else each for each in parts]
    assert_within_rounding(actual, _expected(*wide), _expected(*parts))


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_one_of_the_weights_alone_has_zeros(implementation, num_tokens):
    inputs, parts = _layer(num_tokens)
    plain, plain_parts = _layer(num_tokens, has_zeros=False)
    inputs[4:7], parts = plain[4:7], (*parts[:3], plain_parts[3], *parts[4:])
    actual = fused_moe_w4a16.implementations[implementation](*inputs, None)
    torch.testing.assert_close(actual, _expected(*parts), rtol=1e-4, atol=1e-5)


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts_without_tokens_are_not_read(implementation, num_tokens):
    inputs, parts = _layer(num_tokens, num_choices=1)
    inputs[8][:] = 3
    for place in (2, 3, 5, 6):
        inputs[place][:3], inputs[place][4:] = float("nan"), float("nan")
    actual = fused_moe_w4a16.implementations[implementation](*inputs, None)
    torch.testing.assert_close(actual, _expected(*parts), rtol=1e-4, atol=1e-5)


@IMPLEMENTATIONS
def test_tokens_whose_experts_are_all_absent_give_zero(implementation):
    inputs, parts = _layer(3)
    inputs[8] = torch.tensor([[0, 6], [2, 0], [-1, -1]], dtype=torch.int32)
    expert_map = torch.tensor([-1, 0, -1, 1, 2, 3, 4]).int()
    actual = fused_moe_w4a16.implementations[implementation](*inputs, expert_map)
    local = torch.tensor([[-1, 4], [-1, -1], [-1, -1]])
    torch.testing.assert_close(actual, _expected(*parts[:5], local), rtol=1e-4, atol=1e-5)
    assert actual[0].any() and not actual[1:].any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [2, 40])
def test_a_token_of_nan_leaves_the_others_alone(implementation, num_tokens):
    inputs, _ = _layer(num_tokens)
    clean = fused_moe_w4a16.implementations[implementation](*inputs, None)
    inputs[0][1] = float("nan")
    spoilt = fused_moe_w4a16.implementations[implementation](*inputs, None)
    others = [token for token in range(num_tokens) if token != 1]
    assert spoilt[1].isnan().all()
    torch.testing.assert_close(spoilt[others], clean[others])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 80)}, r"x must have size 32\*Q1 in axis 1, got \[2, 80\]"),
        (
            {"w1_scales": torch.ones(3, 8, 2, 16)},
            r"w1_scales must have a number of groups, size S1, that divides the 3",
        ),
        (
            {"w2_scales": torch.ones(3, 6, 3, 16)},
            r"w2_scales must have a number of groups, size S2, that divides the 2",
        ),
        ({"w1_quants": torch.ones(3, 8, 12, 16)}, "w1_quants must be of dtype torch.int32, got torch.float32"),
        ({"w2_quants": torch.ones(3, 5, 8, 16).int()}, r"w2_quants must have size 2\*Q1 = 6 in axis 1"),
        ({"w2_zeros": torch.ones(3, 6, 1, 16)}, "w2_zeros must have the dtype of w2_scales, torch.float16"),
    ],
)
def test_operands_that_do_not_go_together_are_named(change, message):
    dims = {"T": 2, "Q1": 3, "Q2": 2, "S1": 3, "S2": 1, "X": 3, "Y": 3, "K": 2}
    inputs = make_inputs(fused_moe_w4a16.contract, dims, torch.float32)
    fused_moe_w4a16.contract.check(tuple(inputs.values()))
    with pytest.raises(OpError, match=f"fused_moe_w4a16: {message}"):
        fused_moe_w4a16(*(inputs | change).values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("hidden", "middle"), [(2048, 768), (4096, 1792), (96, 32), (160, 224)])
def test_tiles_divide_the_sizes_and_fit_shared_memory(hidden, middle, device):
    for num_tokens in (1, 16, 100, 512, 8192):
        config = select_packed_config(num_tokens, 8, 128, hidden, middle, device)
        assert middle % config.gate_n == hidden % config.down_n == 0
        assert hidden % config.depth == middle % config.depth == config.depth % 32 == 0
        assert 2 * config.gate_n % 16 == config.down_n % 16 == 0
        if device == "cuda":
            assert config.block_t >= 16
            for columns in (2 * config.gate_n, config.down_n):
                tiles = (config.block_t + columns) * config.depth * torch.bfloat16.itemsize
                assert tiles * config.num_stages <= 64 * 1024


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_differ_by_powers_of_two_of_the_tokens(device):
    """An engine compiles those of powers of two before it serves."""
    for num_tokens in range(1, 1025):
        above = 1 << (num_tokens - 1).bit_length()
        sizes = (8, 128, 2048, 768, device)
        assert select_packed_config(num_tokens, *sizes) == select_packed_config(above, *sizes)


def test_a_cpu_has_blocks_of_few_slots_where_experts_have_few():
    num_tokens = MOST_SLOTS_OF_FEW * 128 // 8
    assert select_packed_config(num_tokens, 8, 128, 2048, 768, "cpu").block_t == FEW_TOKENS
    assert select_packed_config(2 * num_tokens, 8, 128, 2048, 768, "cpu").block_t > FEW_TOKENS
