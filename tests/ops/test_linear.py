import pytest
import torch

from vllm_triton.ops import linear
from vllm_triton.ops.linear.kernel import GROUP_T, select_config
from vllm_triton.ops.testing.tolerance import assert_within_rounding

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(linear.implementations))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_without_bias(implementation, dtype):
    x, weight = torch.randn(5, 63).to(dtype), torch.randn(130, 63).to(dtype)
    actual = linear.implementations[implementation](x, weight, None)
    assert_within_rounding(
        actual, linear.reference(x.double(), weight.double(), None), linear.reference(x, weight, None)
    )


def test_tiles_in_grouped_order_cover_the_result():
    """More tile rows than a group, and a last group that is not full."""
    num_tokens = (GROUP_T + 1) * select_config(1024, 4).block_t + 5
    x, weight, bias = torch.randn(num_tokens, 16), torch.randn(130, 16), torch.randn(130)
    torch.testing.assert_close(linear.implementations["triton"](x, weight, bias), linear.reference(x, weight, bias))


def test_float32_operands_are_not_shortened():
    """1 + 2^-20 survives in float32 and is lost in the 10 mantissa bits of tensor-float."""
    x, weight = torch.full((1, 16), 1 + 2.0**-20), torch.eye(16)
    assert torch.equal(linear.implementations["triton"](x, weight, None), x)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 8192])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_shared_memory(num_tokens, itemsize):
    config = select_config(num_tokens, itemsize)
    stage = (config.block_t + config.block_n) * config.block_k * itemsize
    assert stage * config.num_stages <= 64 * 1024
    assert min(config.block_t, config.block_n, config.block_k) >= 16
