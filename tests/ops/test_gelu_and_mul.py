import pytest
import torch

from vllm_triton.ops import gelu_and_mul
from vllm_triton.ops.testing import assert_within_rounding

# The interpreter computes by NumPy, which warns where exp(100) is infinite and the result 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(gelu_and_mul.implementations))
FORMS = pytest.mark.parametrize("approximate", [True, False])


@IMPLEMENTATIONS
@FORMS
def test_the_first_half_gates_the_second(implementation, approximate):
    x = torch.tensor([[0.0, 100.0, -100.0, 5.0, 3.0, 7.0]])
    out = gelu_and_mul.implementations[implementation](x, approximate)
    torch.testing.assert_close(out, torch.tensor([[0.0, 300.0, 0.0]]))


@IMPLEMENTATIONS
@FORMS
def test_gelu_is_torchs(implementation, approximate):
    gate = torch.linspace(-6, 6, 1001)[None]
    out = gelu_and_mul.implementations[implementation](torch.cat([gate, torch.ones_like(gate)], dim=1), approximate)
    gelu = torch.nn.functional.gelu(gate.double(), approximate="tanh" if approximate else "none")
    assert_within_rounding(out, gelu, gelu.float())


@IMPLEMENTATIONS
def test_the_forms_differ(implementation):
    x = torch.tensor([[2.0, 1.0]])
    approximate, exact = (gelu_and_mul.implementations[implementation](x, form).item() for form in (True, False))
    assert 5e-5 < abs(approximate - exact) < 2e-4


@IMPLEMENTATIONS
@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_gates_stay_finite(implementation, approximate, dtype):
    largest = torch.finfo(dtype).max / 2  # torch doubles its gate
    x = torch.tensor([[-largest, largest, 1.0, 1.0]]).to(dtype)
    out = gelu_and_mul.implementations[implementation](x, approximate)
    assert torch.equal(out, torch.tensor([[0.0, largest]]).to(dtype))


@FORMS
def test_rows_of_several_blocks(approximate):
    from vllm_triton.ops.launch import LARGEST_CPU_ROW_BLOCK

    x = torch.randn(2, 2 * (2 * LARGEST_CPU_ROW_BLOCK + 63))
    actual = gelu_and_mul.implementations["triton"](x, approximate)
    torch.testing.assert_close(actual, gelu_and_mul.reference(x, approximate))
