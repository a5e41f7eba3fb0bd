import pytest
import torch

from vllm_triton.ops import fused_add_rms_norm, rms_norm

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(fused_add_rms_norm.implementations))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_normalises_the_sum_as_it_was_rounded(implementation, dtype):
    x, residual, weight = torch.randn(5, 63).to(dtype), 8 * torch.randn(5, 63).to(dtype), torch.randn(63).to(dtype)
    out, residual_out = fused_add_rms_norm.implementations[implementation](x, residual, weight, 1e-5)
    # Triton's interpreter shortens float32 to bfloat16 without rounding to nearest: equal within a unit.
    torch.testing.assert_close(residual_out, x + residual)
    assert torch.equal(out, rms_norm.implementations[implementation](residual_out, weight, 1e-5))


def test_rows_longer_than_a_block_are_looped_over():
    from vllm_triton.ops.rms_norm.kernel import LARGEST_BLOCK

    x, residual = torch.randn(2, 2, LARGEST_BLOCK + 63).unbind(0)
    weight = torch.randn(LARGEST_BLOCK + 63)
    actual = fused_add_rms_norm.implementations["triton"](x, residual, weight, 1e-5)
    for one, other in zip(actual, fused_add_rms_norm.reference(x, residual, weight, 1e-5), strict=True):
        torch.testing.assert_close(one, other)


@IMPLEMENTATIONS
def test_results_share_no_memory_with_the_arguments(implementation):
    x, residual = torch.randn(1, 8), torch.zeros(1, 8)
    results = fused_add_rms_norm.implementations[implementation](x, residual, torch.ones(8), 1e-5)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (x, residual, *results)}
    assert len(storages) == 4
