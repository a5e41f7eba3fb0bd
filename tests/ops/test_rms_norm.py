import pytest
import torch

from vllm_triton.ops import rms_norm
from vllm_triton.ops.errors import ShapeError
from vllm_triton.ops.testing import assert_within_rounding

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(rms_norm.implementations))
# Heads [T, H, 4] of a storage of [T, 28].
VIEWS = {
    "queries of a fused projection": lambda fused: fused[:, :12].unflatten(1, (3, 4)),
    "keys of a fused projection": lambda fused: fused[:, 12:20].unflatten(1, (2, 4)),
    "every other head": lambda fused: fused[:, :24].unflatten(1, (6, 4))[:, ::2],
    "heads before tokens": lambda fused: fused.view(7, -1, 4)[:3].transpose(0, 1),
    "one head for all": lambda fused: fused[:, None, :4].expand(-1, 3, -1),
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("num_tokens", [5, 70])
def test_every_head_is_normed_alone(implementation, dtype, view, num_tokens):
    """Each as a row of its own, from any strides into a contiguous result."""
    x, weight = VIEWS[view](torch.randn(num_tokens, 28).to(dtype)), torch.randn(4).to(dtype)
    rows = x.reshape(-1, 4)
    out = rms_norm.implementations[implementation](x, weight, 1e-5)
    assert out.shape == x.shape and out.is_contiguous()
    exact = rms_norm.reference(rows.double(), weight.double(), 1e-5).view(x.shape)
    assert_within_rounding(out, exact, rms_norm.reference(rows, weight, 1e-5).view(x.shape))


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8), (2, 0, 8)])
def test_nothing_to_norm(implementation, shape):
    assert rms_norm.implementations[implementation](torch.empty(shape), torch.ones(8), 1e-5).shape == shape


@pytest.mark.parametrize("shape", [(8,), (1, 2, 3, 8)])
def test_refuses_other_numbers_of_axes(shape):
    with pytest.raises(ShapeError, match=r"rms_norm: x must have shape \[T H\? E\], got"):
        rms_norm(torch.ones(shape), torch.ones(8), 1e-5)


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [60, 70])
def test_a_float32_weight_is_not_rounded(implementation, num_tokens):
    """1 + 2^-12 is no float16: rounded to one, it would be 1 and all results too small by as much."""
    x, weight = torch.randn(num_tokens, 130).half(), torch.full((130,), 1 + 2**-12)
    out = rms_norm.implementations[implementation](x, weight, 1e-5)
    exact = rms_norm.reference(x.double(), weight.double(), 1e-5)
    assert out.dtype == torch.float16
    assert (out / exact - 1).mean().abs() < 2**-15
