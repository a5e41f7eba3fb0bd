import pytest
import torch

from vllm_triton.ops import w4a16_mm
from vllm_triton.ops.w4a16_mm.kernel import select_config
from vllm_triton.ops.w4a16_mm.layout import pack, unpack

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(w4a16_mm.implementations))


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 16, 83])
def test_packed_product_equals_the_plain_one(implementation, num_tokens, num_rows):
    """Of numbers whose products and sums are exact, in any order."""
    quants = torch.randint(0, 16, (num_rows, 96))
    scales, minima = 2.0 ** torch.randint(-1, 2, (num_rows, 3)), torch.randint(-9, 9, (num_rows, 3)).half()
    weight = quants * scales.repeat_interleave(32, 1) + minima.repeat_interleave(32, 1)
    x = torch.randint(-4, 5, (num_tokens, 96)).float()
    out = w4a16_mm.implementations[implementation](x, *pack(quants, scales, minima))
    assert out.shape == (num_tokens, -(-num_rows // 16) * 16)
    assert torch.equal(out[:, :num_rows], x @ weight.T)
    assert not out[:, num_rows:].any()


@IMPLEMENTATIONS
@pytest.mark.parametrize("place", range(8))
def test_each_value_of_a_word_at_each_of_its_sixteen_levels(implementation, place):
    """One input is 1 and the others are 0: the result is that column, without any rounding."""
    quants = torch.zeros(16, 32, dtype=torch.int64)
    quants[:, 24 + place] = torch.arange(16)
    quants[:, 23], quants[:, :8] = 15, 15
    x = torch.zeros(1, 32)
    x[0, 24 + place] = 1
    out = w4a16_mm.implementations[implementation](x, *pack(quants, torch.ones(16, 1), torch.zeros(16, 1)))
    assert out.tolist() == [list(range(16))]


def test_pack_keeps_every_value():
    quants = torch.randint(0, 16, (50, 64))
    scales, minima = torch.randn(2, 50, 2).half()
    words, packed_scales, packed_minima = pack(quants, scales, minima)
    assert words.shape == (4, 8, 16) and words.dtype == torch.int32
    assert torch.equal(unpack(words)[:50], quants.int()) and not unpack(words)[50:].any()
    for values, packed in ((scales, packed_scales), (minima, packed_minima)):
        assert packed.shape == (4, 2, 16)
        assert torch.equal(packed.transpose(1, 2).reshape(64, 2)[:50], values)


@pytest.mark.parametrize(
    "quants, blocks, message",
    [
        (torch.zeros(2, 40), 1, "multiple of 32, got 40"),
        (torch.full((2, 32), 16), 1, "0 to 15, got 16 to 16"),
        (torch.full((2, 32), -1), 1, "0 to 15, got -1 to -1"),
        (torch.zeros(2, 64), 1, r"scales must have shape \[2, 2\], got \[2, 1\]"),
    ],
)
def test_pack_refuses(quants, blocks, message):
    with pytest.raises(ValueError, match=message):
        pack(quants, torch.ones(2, blocks), torch.ones(2, blocks))


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 36, 1792])
def test_groups_of_one_token_leave_no_rest(num_groups):
    assert num_groups % select_config(1, num_groups).block_j == 0
