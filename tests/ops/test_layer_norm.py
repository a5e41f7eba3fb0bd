import pytest
import torch

from vllm_triton.ops import layer_norm
from vllm_triton.ops.testing import assert_within_rounding

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(layer_norm.implementations))


@IMPLEMENTATIONS
@pytest.mark.parametrize("biased", [True, False])
def test_rows_have_mean_and_deviation_of_bias_and_weight(implementation, biased):
    x, weight = 3 * torch.randn(5, 100) + 7, torch.full((100,), 2.0)
    out = layer_norm.implementations[implementation](x, weight, torch.full((100,), 4.0) if biased else None, 1e-9)
    torch.testing.assert_close(out.mean(dim=1), torch.full((5,), 4.0 if biased else 0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.std(dim=1, correction=0), torch.full((5,), 2.0))


@IMPLEMENTATIONS
def test_a_large_mean_does_not_cancel_the_variance(implementation):
    """mean(x^2) - mean(x)^2 would be rounded to whole units here, and the variance is 1/4."""
    x = torch.tensor([[4096.5, 4097.5] * 32])
    out = layer_norm.implementations[implementation](x, torch.ones(64), None, 1e-5)
    torch.testing.assert_close(out, torch.tensor([[-1.0, 1.0] * 32]), rtol=0, atol=1e-4)


@IMPLEMENTATIONS
def test_no_rows_and_one_column(implementation):
    function = layer_norm.implementations[implementation]
    assert function(torch.empty(0, 8), torch.ones(8), None, 1e-5).shape == (0, 8)
    torch.testing.assert_close(
        function(torch.randn(3, 1).half(), torch.ones(1).half(), None, 1e-5).float(),
        torch.zeros(3, 1),
        rtol=0,
        atol=1e-4,
    )


def test_rows_longer_than_a_block_are_looped_over():
    from vllm_triton.ops.rms_norm.kernel import LARGEST_BLOCK

    x, (weight, bias) = torch.randn(2, LARGEST_BLOCK + 63) + 5, torch.randn(2, LARGEST_BLOCK + 63)
    exact = layer_norm.reference(x.double(), weight.double(), bias.double(), 1e-5)
    actual = layer_norm.implementations["triton"](x, weight, bias, 1e-5)
    assert_within_rounding(actual, exact, layer_norm.reference(x, weight, bias, 1e-5))
