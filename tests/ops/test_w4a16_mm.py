import pytest
import torch

from vllm_triton.ops import w4a16_mm
from vllm_triton.ops.contract import FLOATS
from vllm_triton.ops.errors import DTypeError, ShapeError
from vllm_triton.ops.testing import assert_within_rounding, suite
from vllm_triton.ops.testing.inputs import make_inputs
from vllm_triton.ops.w4a16_mm.kernel import select_config
from vllm_triton.ops.w4a16_mm.layout import dequantize, pack, pack_words, unpack, words_of
from vllm_triton.ops.w4a16_mm.op import packed_dims

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(w4a16_mm.implementations))
EACH_COUNT = pytest.mark.parametrize("num_tokens", [1, 2, 3, 20])


def _weight(num_rows, depth, group_size):
    """(quants, scales, zeros), whose products with small integers and their sums are exact in any order."""
    num_groups = depth // group_size
    quants, zeros = torch.randint(0, 16, (num_rows, depth)), torch.randint(0, 17, (num_rows, num_groups))
    zeros[0, 0], zeros[-1, -1] = 0, 16
    return quants, 2.0 ** torch.randint(-1, 2, (num_rows, num_groups)), zeros


def _dense(quants, scales, zeros):
    group_size = quants.shape[1] // scales.shape[1]
    return (quants - zeros.repeat_interleave(group_size, 1)) * scales.repeat_interleave(group_size, 1)


@IMPLEMENTATIONS
@EACH_COUNT
@pytest.mark.parametrize("num_rows", [1, 16, 83])
@pytest.mark.parametrize("group_size", [32, 64, 96, 192])
def test_packed_product_equals_the_plain_one(implementation, num_tokens, num_rows, group_size):
    quants, scales, zeros = _weight(num_rows, 192, group_size)
    x = torch.randint(-4, 5, (num_tokens, 192)).float()
    out = w4a16_mm.implementations[implementation](x, *pack(quants, scales, zeros), None, None)
    assert out.shape == (num_tokens, -(-num_rows // 16) * 16)
    assert torch.equal(out[:, :num_rows], x @ _dense(quants, scales, zeros).T)
    assert not out[:, num_rows:].any()


@IMPLEMENTATIONS
@EACH_COUNT
def test_without_zeros_they_are_8(implementation, num_tokens):
    quants, scales, _ = _weight(40, 128, 64)
    x = torch.randint(-4, 5, (num_tokens, 128)).float()
    out = w4a16_mm.implementations[implementation](x, *pack(quants, scales), None, None)
    assert torch.equal(out[:, :40], x @ _dense(quants, scales, torch.full((40, 2), 8)).T)


@IMPLEMENTATIONS
@EACH_COUNT
def test_order_says_which_input_meets_a_column(implementation, num_tokens):
    """As of a weight with act-order: groups of columns that lie apart, here sorted."""
    quants, scales, zeros = _weight(48, 256, 64)
    order = torch.randperm(256).int()
    weight = torch.empty(48, 256)
    weight[:, order.long()] = _dense(quants, scales, zeros)
    x = torch.randint(-4, 5, (num_tokens, 256)).float()
    bias = torch.randint(-9, 10, (48,)).float()
    out = w4a16_mm.implementations[implementation](x, *pack(quants, scales, zeros), order, bias)
    assert torch.equal(out, x @ weight.T + bias)


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("place", range(8))
def test_each_value_of_a_word_at_each_of_its_sixteen_levels(implementation, num_tokens, place):
    """One input is 1 and the others are 0: the result is that column, without any rounding."""
    quants = torch.zeros(16, 32, dtype=torch.int64)
    quants[:, 24 + place] = torch.arange(16)
    quants[:, 23], quants[:, :8] = 15, 15
    x = torch.zeros(num_tokens, 32)
    x[0, 24 + place] = 1
    for zero in (0, 5, 16):
        packed = pack(quants, torch.ones(16, 1), torch.full((16, 1), zero))
        out = w4a16_mm.implementations[implementation](x, *packed, None, None)
        assert out[0].tolist() == [value - zero for value in range(16)]


@IMPLEMENTATIONS
@pytest.mark.parametrize("scales_dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_value_that_equals_its_zero_is_exactly_0(implementation, scales_dtype, num_tokens):
    quants = torch.randint(0, 16, (32, 1)).expand(32, 64)
    packed = pack(quants, torch.rand(32, 2).to(scales_dtype), quants[:, :2])
    x = torch.zeros(num_tokens, 64)
    x[:, ::7] = 1
    assert not w4a16_mm.implementations[implementation](x, *packed, None, None).any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("group_size", [128, -1])
def test_a_deep_weight_is_within_rounding(implementation, num_tokens, group_size):
    """Sums of as many values as a model's largest projections have, and one group for all of them."""
    inputs = make_inputs(w4a16_mm.contract, packed_dims(num_tokens, 16, 4096, group_size, zeros=1), torch.float32)
    exact, eager = (w4a16_mm.reference(*each.values()) for each in (suite.widened(inputs), inputs))
    assert_within_rounding(w4a16_mm.implementations[implementation](*inputs.values()), exact, eager)


@IMPLEMENTATIONS
def test_no_tokens(implementation):
    out = w4a16_mm.implementations[implementation](torch.zeros(0, 64), *pack(*_weight(20, 64, 32)), None, None)
    assert out.shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_pack_keeps_every_value(dtype):
    quants, scales, zeros = _weight(1050, 64, 32)
    scales = scales.half()
    words, packed_scales, packed_zeros = pack(quants.to(dtype), scales, zeros)
    assert words.shape == (66, 8, 16) and words.dtype == torch.int32
    assert torch.equal(unpack(words)[:1050], quants.int()) and not unpack(words)[1050:].any()
    assert packed_scales.dtype == packed_zeros.dtype == torch.float16
    for values, packed in ((scales, packed_scales), (zeros, packed_zeros)):
        assert packed.shape == (66, 2, 16)
        assert torch.equal(packed.transpose(1, 2).reshape(-1, 2)[:1050], values.half())
    weight = dequantize(words, packed_scales, packed_zeros, torch.float32)
    assert torch.equal(weight[:1050], _dense(quants, scales, zeros)) and not weight[1050:].any()


@pytest.mark.parametrize(
    "quants, groups, zeros, message",
    [
        (torch.zeros(2, 40), 1, None, "multiple of 32, got 40"),
        (torch.zeros(2, 0), 1, None, "multiple of 32, got 0"),
        (torch.full((2, 32), 16), 1, None, "quants must lie in 0 to 15, got 16 to 16"),
        (torch.full((2, 32), -1), 1, None, "quants must lie in 0 to 15, got -1 to -1"),
        (torch.full((2, 32), 1.5), 1, None, "quants must be integers, got 1.5"),
        (torch.zeros(2, 128), 3, None, r"scales must have shape \[2, a divisor of 4\], got \[2, 3\]"),
        (torch.zeros(2, 64), 0, None, r"scales must have shape \[2, a divisor of 2\], got \[2, 0\]"),
        (torch.zeros(2, 64), 1, torch.zeros(2, 2), r"zeros must have the shape of scales, \[2, 1\], got \[2, 2\]"),
        (torch.zeros(2, 64), 1, torch.full((2, 1), 17), "zeros must lie in 0 to 16, got 17 to 17"),
    ],
)
def test_pack_refuses(quants, groups, zeros, message):
    with pytest.raises(ValueError, match=message):
        pack(quants, torch.ones(2, groups), zeros)


def test_pack_words_takes_words_of_a_view_too():
    quants, scales, zeros = _weight(20, 64, 32)
    words = words_of(quants.to(torch.uint8))
    for given in (words, words.T.contiguous().T):
        assert torch.equal(pack_words(given, scales, zeros)[0], pack(quants, scales, zeros)[0])
    with pytest.raises(ValueError, match="multiple of 32, got 40"):
        pack_words(words[:, :5], scales, zeros)


@pytest.mark.parametrize(
    "changed, error, message",
    [
        ({"scales": torch.ones(2, 3, 16), "zeros": None}, ShapeError, "scales must have a number .* 4 blocks .* got 3"),
        ({"scales": torch.ones(2, 0, 16), "zeros": None}, ShapeError, "scales must have a number .* 4 blocks .* got 0"),
        ({"zeros": torch.ones(2, 1, 16)}, ShapeError, "zeros must have size S = 2"),
        ({"zeros": torch.ones(2, 2, 16).half()}, DTypeError, "zeros must have the dtype of scales"),
        ({"order": torch.arange(64).int()}, ShapeError, "order must have size 32\\*Q = 128"),
        ({"order": torch.arange(128)}, DTypeError, "order must be of dtype torch.int32"),
        ({"bias": torch.ones(31)}, ShapeError, "bias must have size 16\\*J = 32"),
        (
            {"x": torch.ones(3, 0), "quants": torch.zeros(2, 0, 16).int(), "order": torch.zeros(0).int()},
            ShapeError,
            "x must have one block of 32 columns at least, got 0",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, error, message):
    inputs = make_inputs(w4a16_mm.contract, packed_dims(3, 32, 128, 64, scales=3, zeros=1, order=1, bias=1), FLOATS[2])
    w4a16_mm.contract.check(tuple(inputs.values()))
    with pytest.raises(error, match=f"w4a16_mm: {message}"):
        w4a16_mm(*(inputs | changed).values())


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 36, 1792])
@pytest.mark.parametrize("depth", [32, 96, 576, 4096])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tiles_leave_no_rest(num_groups, depth, device):
    for num_tokens in (1, 2, 3, 400):
        for has_order in (False, True):
            config = select_config(num_tokens, num_groups, depth, has_order, device)
            assert num_groups % config.block_j == 0 and depth % config.block_k == 0
