import pytest
import torch

from vllm_triton.ops import silu_and_mul

# The interpreter computes the sigmoid by NumPy, which warns where exp(100) is infinite and the result 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(silu_and_mul.implementations))


@IMPLEMENTATIONS
def test_the_first_half_gates_the_second(implementation):
    x = torch.tensor([[0.0, 100.0, -100.0, 5.0, 3.0, 7.0]])
    out = silu_and_mul.implementations[implementation](x)
    torch.testing.assert_close(out, torch.tensor([[0.0, 300.0, 0.0]]))


@IMPLEMENTATIONS
def test_extreme_gates_stay_finite(implementation):
    x = torch.tensor([[-65504.0, 65504.0, 1.0, 1.0]]).half()
    out = silu_and_mul.implementations[implementation](x)
    assert torch.equal(out, torch.tensor([[0.0, 65504.0]]).half())


def test_rows_of_several_blocks():
    from vllm_triton.ops.launch import LARGEST_CPU_ROW_BLOCK

    x = torch.randn(2, 2 * (2 * LARGEST_CPU_ROW_BLOCK + 63))
    torch.testing.assert_close(silu_and_mul.implementations["triton"](x), silu_and_mul.reference(x))
