import pytest
import torch

from vllm_triton.ops import softcap_logits

# The interpreter computes by NumPy, which warns where exp(2000) is infinite and the result the bound.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(softcap_logits.implementations))


@IMPLEMENTATIONS
def test_large_logits_reach_the_bound_and_infinite_ones_too(implementation):
    logits = torch.tensor([[1e4, -1e4, 3e38, float("inf"), float("-inf"), 0.0]])
    out = softcap_logits.implementations[implementation](logits, 30.0)
    assert torch.equal(out, torch.tensor([[30.0, -30.0, 30.0, 30.0, -30.0, 0.0]]))


@IMPLEMENTATIONS
def test_every_value_is_within_units_of_its_own_rounding(implementation):
    """Also those near 0, which a difference of exponentials would lose."""
    positive = torch.logspace(-6, 2.5, 4000)[None]
    logits = torch.cat([positive, -positive], dim=1)
    out = softcap_logits.implementations[implementation](logits, 30.0)
    torch.testing.assert_close(out.double(), 30 * torch.tanh(logits.double() / 30), rtol=2e-6, atol=0)


@IMPLEMENTATIONS
def test_order_is_kept(implementation):
    logits = torch.linspace(-90, 90, 1001)[None]
    assert (softcap_logits.implementations[implementation](logits, 30.0).diff() > 0).all()


def test_rows_of_several_blocks():
    from vllm_triton.ops.launch import LARGEST_CPU_ROW_BLOCK

    logits = torch.randn(2, 2 * LARGEST_CPU_ROW_BLOCK + 63)
    actual = softcap_logits.implementations["triton"](logits, 1.5)
    torch.testing.assert_close(actual, softcap_logits.reference(logits, 1.5))
