"""What is written value by value, as the formats are described, is read back."""

import pytest
import torch
from int4_files import AWQ_ORDER, IN_TURN, gptq_zeros, packed_along

from vllm_triton.ops import w4a16_mm
from vllm_triton.ops.w4a16_mm import checkpoints
from vllm_triton.ops.w4a16_mm.checkpoints import from_awq, from_compressed_tensors, from_gptq
from vllm_triton.ops.w4a16_mm.layout import pack_words, unpack

EACH_GROUP_SIZE = pytest.mark.parametrize("group_size", [32, 64, 96, 192])


@pytest.fixture(params=[4000, 100, 1], ids="words_at_a_time={}".format)
def pieces(request, monkeypatch):
    """All at once, in pieces of several words of a row with a smaller one at the end, and word by word."""
    monkeypatch.setattr(checkpoints, "_WORDS_AT_A_TIME", request.param)


def random_weight(num_rows, depth, group_size):
    """(quants [N, K], scales [N, S], zeros [N, S]); zeros of 16 values, each of which is there."""
    num_groups = depth // group_size
    zeros = torch.arange(num_rows * num_groups).reshape(num_rows, num_groups) * 5 % 16
    return torch.randint(0, 16, (num_rows, depth)), torch.rand(num_rows, num_groups).half(), zeros


def same(stored, quants, scales, zeros):
    words, _, _ = pack_words(stored.words, stored.scales, stored.zeros)
    assert torch.equal(unpack(words)[: len(quants)].long(), quants)
    assert torch.equal(stored.scales, scales)
    assert stored.zeros is None if zeros is None else torch.equal(stored.zeros.long(), zeros)


@EACH_GROUP_SIZE
@pytest.mark.usefixtures("pieces")
def test_awq(group_size):
    quants, scales, zeros = random_weight(48, 192, group_size)
    qweight, qzeros = (packed_along(values.T, 1, AWQ_ORDER) for values in (quants, zeros))
    stored = from_awq(qweight, qzeros, scales.T.contiguous())
    same(stored, quants, scales, zeros)
    assert stored.order is None


@EACH_GROUP_SIZE
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("has_g_idx", [True, False])
def test_gptq(group_size, checkpoint_format, has_g_idx):
    quants, scales, zeros = random_weight(48, 192, group_size)
    qweight, qzeros = packed_along(quants.T, 0, IN_TURN), gptq_zeros(zeros, checkpoint_format)
    g_idx = (torch.arange(192) // group_size).int() if has_g_idx else None
    stored = from_gptq(qweight, qzeros, scales.T.contiguous(), g_idx, checkpoint_format)
    same(stored, quants, scales, zeros)
    assert stored.order is None


@EACH_GROUP_SIZE
@pytest.mark.parametrize("num_rows", [48, 43])
def test_compressed_tensors(group_size, num_rows):
    quants, scales, zeros = random_weight(num_rows, 192, group_size)
    shape, packed = torch.tensor([num_rows, 192]), packed_along(quants, 1, IN_TURN)
    stored = from_compressed_tensors(packed, scales, shape, packed_along(zeros, 0, IN_TURN))
    same(stored, quants, scales, zeros)
    assert stored.order is None
    same(from_compressed_tensors(packed, scales, shape), quants, scales, None)
    unset = torch.full((192,), -1)
    assert from_compressed_tensors(packed, scales, shape, None, unset).order is None


def test_zeros_that_are_all_8_are_left_out():
    quants, scales, _ = random_weight(16, 64, 32)
    sevens = packed_along(torch.full((2, 16), 7), 1, IN_TURN)
    assert from_gptq(packed_along(quants.T, 0, IN_TURN), sevens, scales.T, None).zeros is None
    eights = packed_along(torch.full((2, 16), 8), 1, AWQ_ORDER)
    assert from_awq(packed_along(quants.T, 1, AWQ_ORDER), eights, scales.T).zeros is None


def _with_act_order():
    """(quants, scales, zeros, g_idx, the weight itself), columns as a checkpoint has them."""
    quants, scales, zeros = random_weight(32, 128, 32)
    g_idx = (torch.arange(128) // 32)[torch.randperm(128)]
    return quants, scales, zeros, g_idx, (quants - zeros[:, g_idx]) * scales[:, g_idx].float()


def _assert_product_is_the_weights(stored, weight):
    x = torch.eye(128)[torch.randperm(128)]
    out = w4a16_mm.reference(x, *pack_words(stored.words, stored.scales, stored.zeros), stored.order, None)
    assert torch.equal(out, x @ weight.T)


@pytest.mark.usefixtures("pieces")
def test_gptq_with_act_order():
    quants, scales, zeros, g_idx, weight = _with_act_order()
    qweight, qzeros = packed_along(quants.T, 0, IN_TURN), gptq_zeros(zeros, "gptq")
    stored = from_gptq(qweight, qzeros, scales.T, g_idx.int())
    assert stored.order.dtype == torch.int32
    assert stored.order.tolist() == sorted(range(128), key=lambda column: int(g_idx[column]))
    _assert_product_is_the_weights(stored, weight)


@pytest.mark.usefixtures("pieces")
def test_compressed_tensors_with_act_order():
    quants, scales, zeros, g_idx, weight = _with_act_order()
    packed = packed_along(quants, 1, IN_TURN)
    stored = from_compressed_tensors(
        packed, scales, torch.tensor([32, 128]), packed_along(zeros, 0, IN_TURN), g_idx.int()
    )
    _assert_product_is_the_weights(stored, weight)


def _gptq(**changed):
    arguments = {
        "qweight": torch.zeros(8, 16).int(),
        "qzeros": torch.zeros(2, 2).int(),
        "scales": torch.ones(2, 16),
        "g_idx": torch.arange(64) // 32,
    }
    return from_gptq(**arguments | changed)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'"),
        ({"scales": torch.ones(16)}, r"scales must be a matrix of floats, got torch.float32 of shape \[16\]"),
        ({"scales": torch.ones(2, 20)}, r"scales must have a multiple of 8 columns, got shape \[2, 20\]"),
        ({"scales": torch.ones(3, 16), "qzeros": torch.zeros(3, 2).int()}, "multiple of 32, got 3 of 64 inputs"),
        ({"scales": torch.ones(4, 16), "qzeros": torch.zeros(4, 2).int()}, "multiple of 32, got 4 of 64 inputs"),
        ({"qweight": torch.zeros(8, 24).int()}, r"qweight must be int32 of shape \[8, 16\], got .* \[8, 24\]"),
        ({"qzeros": torch.zeros(2, 2)}, r"qzeros must be int32 of shape \[2, 2\], got torch.float32"),
        ({"g_idx": torch.zeros(32)}, r"g_idx must have shape \[64\], got \[32\]"),
        ({"g_idx": torch.arange(64) // 16}, "g_idx must lie in 0 to 1, .* got 0 to 3"),
        ({"g_idx": (torch.arange(64) > 8).int()}, "equally many inputs in each group, 32, got 9 to 55"),
    ],
)
def test_gptq_that_does_not_fit(changed, message):
    with pytest.raises(ValueError, match=message):
        _gptq(**changed)


def test_awq_that_does_not_fit():
    zeros, scales = torch.zeros(2, 2).int(), torch.ones(2, 16)
    with pytest.raises(ValueError, match=r"qweight must be int32 of shape \[64, 2\], got torch.int32 .* \[64, 3\]"):
        from_awq(torch.zeros(64, 3).int(), zeros, scales)
    with pytest.raises(ValueError, match=r"qzeros must be int32 of shape \[2, 2\], got torch.int32 .* \[1, 2\]"):
        from_awq(torch.zeros(64, 2).int(), zeros[:1], scales)
    with pytest.raises(ValueError, match="a multiple of 32, got 2 of 48 inputs"):
        from_awq(torch.zeros(48, 2).int(), zeros, scales)


def test_compressed_tensors_that_does_not_fit():
    packed, scales, shape = torch.zeros(16, 8).int(), torch.ones(16, 2), torch.tensor([16, 64])
    with pytest.raises(ValueError, match=r"weight_packed must be int32 of shape \[16, 8\], got torch.int64"):
        from_compressed_tensors(packed.long(), scales, shape)
    with pytest.raises(ValueError, match=r"weight_scale must have 16 rows, got shape \[1, 1\]"):
        from_compressed_tensors(packed, scales[:1, :1], shape)
    with pytest.raises(ValueError, match=r"weight_zero_point must be int32 of shape \[2, 2\], got torch.int8"):
        from_compressed_tensors(packed, scales, shape, torch.zeros(16, 2, dtype=torch.int8))
    with pytest.raises(ValueError, match="weight_g_idx must have equally many inputs in each group, 32, got 1 to 63"):
        from_compressed_tensors(packed, scales, shape, None, (torch.arange(64) > 62).int())
