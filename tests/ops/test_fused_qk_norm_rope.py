import pytest
import torch

from vllm_triton.ops import fused_qk_norm_rope, rms_norm, rotary_embedding
from vllm_triton.ops.errors import ShapeError
from vllm_triton.ops.testing import assert_within_rounding

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(fused_qk_norm_rope.implementations))


@IMPLEMENTATIONS
@pytest.mark.parametrize("rotary", [16, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_every_head_then_turns_it(implementation, rotary, dtype):
    """As the two ops in a row do, in float64; query and key are views of a fused projection."""
    fused = torch.randn(4, 7 * 16).to(dtype)
    query, key = fused[:, :64].unflatten(1, (4, 16)), fused[:, 64:96].unflatten(1, (2, 16))
    query_weight, key_weight = torch.randn(2, 16).to(dtype)
    positions, cos_sin = torch.tensor([9, 0, 3, 3]), torch.randn(10, rotary)
    arguments = (positions, query, key, query_weight, key_weight, cos_sin, 1e-6)
    normed = (
        rms_norm.reference(heads.double(), weight.double(), 1e-6)
        for heads, weight in ((query, query_weight), (key, key_weight))
    )
    exact = rotary_embedding.reference(positions, *normed, cos_sin.double(), False)
    actual = fused_qk_norm_rope.implementations[implementation](*arguments)
    for result, wanted, eager in zip(actual, exact, fused_qk_norm_rope.reference(*arguments), strict=True):
        assert result.is_contiguous() and result.untyped_storage().data_ptr() != fused.untyped_storage().data_ptr()
        assert_within_rounding(result, wanted, eager)


@IMPLEMENTATIONS
def test_no_tokens(implementation):
    heads, weight = torch.empty(0, 3, 8), torch.ones(8)
    arguments = (torch.empty(0).long(), heads, heads, weight, weight, torch.ones(4, 8), 1e-6)
    assert [out.shape for out in fused_qk_norm_rope.implementations[implementation](*arguments)] == [(0, 3, 8)] * 2


def test_more_heads_than_a_tile_holds():
    query, key, weights = torch.randn(1, 128, 128), torch.randn(1, 70, 128), torch.randn(2, 128)
    arguments = (torch.tensor([2]), query, key, *weights, torch.randn(3, 128), 1e-6)
    actual = fused_qk_norm_rope.implementations["triton"](*arguments)
    for result, expected in zip(actual, fused_qk_norm_rope.reference(*arguments), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("rotary", [3, 10])
def test_refuses_a_rotary_size_that_is_odd_or_larger_than_the_head(rotary):
    query, weight = torch.randn(1, 1, 8), torch.ones(8)
    message = f"fused_qk_norm_rope: cos_sin must have an even size R of at most D = 8 in axis 1, got {rotary}"
    with pytest.raises(ShapeError, match=message):
        fused_qk_norm_rope(torch.zeros(1).long(), query, query, weight, weight, torch.randn(4, rotary), 1e-6)
