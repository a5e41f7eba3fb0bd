import pytest
import torch

from vllm_triton.ops import scaled_quant
from vllm_triton.ops.errors import DTypeError, ShapeError
from vllm_triton.ops.platforms import triton_interprets
from vllm_triton.ops.scaled_quant import PER_TENSOR, PER_TOKEN
from vllm_triton.ops.scaled_quant.kernel import LARGEST_BLOCK
from vllm_triton.ops.scaled_quant.reference import LARGEST, SMALLEST_SCALE
from vllm_triton.ops.testing.inputs import same_bits

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(scaled_quant.implementations))
DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
GROUP_SIZES = pytest.mark.parametrize("group_size", [PER_TENSOR, PER_TOKEN, 32, 128])


def _needs_fp8(implementation: str) -> None:
    if implementation == "triton" and triton_interprets():
        pytest.skip(
            "Triton's interpreter does not round small fp8 numbers; tests/triton_cpu/test_ops.py does it natively"
        )


@IMPLEMENTATIONS
@DTYPES
@GROUP_SIZES
@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equals_the_reference_bit_for_bit(implementation, dtype, group_size, x_dtype):
    if dtype == torch.float8_e4m3fn:
        _needs_fp8(implementation)
    x = (torch.randn(40, 300) * 10.0 ** torch.randint(-4, 4, (40, 1))).to(x_dtype)
    actual = scaled_quant.implementations[implementation](x, dtype, group_size)
    for one, other in zip(actual, scaled_quant.reference(x, dtype, group_size), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)


@IMPLEMENTATIONS
def test_int8_is_rounded_to_even_and_cut_at_both_ends(implementation):
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 128, 1e9, -127.5, -128, -1e9]])
    quantize = scaled_quant.implementations[implementation]
    values, scales = quantize(x, torch.int8, PER_TENSOR, torch.ones(1))
    assert values.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, 127, -127, -127, -127]]
    assert scales.tolist() == [1]


@IMPLEMENTATIONS
def test_fp8_is_rounded_to_even_and_cut_at_both_ends(implementation):
    _needs_fp8(implementation)
    x = torch.tensor([[17, 19, -17, 463, 465, 1e9, -1e9, 2.0**-10, 3 * 2.0**-10]])
    quantize = scaled_quant.implementations[implementation]
    values, _ = quantize(x, torch.float8_e4m3fn, PER_TENSOR, torch.ones(1))
    assert values.float().tolist() == [[16, 20, -16, 448, 448, 448, -448, 0, 2.0**-8]]


@IMPLEMENTATIONS
@DTYPES
@GROUP_SIZES
def test_zeros_stay_zeros(implementation, dtype, group_size):
    x = torch.zeros(5, 130)
    values, scales = scaled_quant.implementations[implementation](x, dtype, group_size)
    assert not values.float().any() and (scales == SMALLEST_SCALE).all()


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("num_columns", [1, 100, LARGEST_BLOCK + 5])
def test_the_largest_of_a_token_becomes_the_end_of_the_range(implementation, dtype, num_columns):
    x = torch.randn(3, num_columns).clamp(-7, 7)
    x[:, -1] = torch.tensor([8.0, -9.0, 10.0])
    values, scales = scaled_quant.implementations[implementation](x, dtype, PER_TOKEN)
    assert values[:, -1].float().tolist() == [LARGEST[dtype], -LARGEST[dtype], LARGEST[dtype]]
    torch.testing.assert_close(scales[:, 0], torch.tensor([8.0, 9.0, 10.0]) / LARGEST[dtype])


@IMPLEMENTATIONS
@pytest.mark.parametrize("token", [0, 1, 63, 99])
def test_one_scale_sees_every_token(implementation, token):
    x = torch.randn(100, 24).clamp(-7, 7)
    x[token, 23] = -254.0
    values, scales = scaled_quant.implementations[implementation](x, torch.int8, PER_TENSOR)
    assert scales.tolist() == [2.0] and torch.equal(values, (x / 2).round().to(torch.int8))


@IMPLEMENTATIONS
@pytest.mark.parametrize("group_size", [PER_TOKEN, 32])
def test_tokens_do_not_depend_on_each_other(implementation, group_size):
    quantize = scaled_quant.implementations[implementation]
    x = torch.randn(9, 70)
    order = torch.tensor([4, 0, 8, 2])
    for all_tokens, some in zip(
        quantize(x, torch.int8, group_size), quantize(x[order], torch.int8, group_size), strict=True
    ):
        assert torch.equal(all_tokens[order], some)


@IMPLEMENTATIONS
@DTYPES
@GROUP_SIZES
def test_no_tokens(implementation, dtype, group_size):
    values, scales = scaled_quant.implementations[implementation](torch.empty(0, 40), dtype, group_size)
    assert values.shape == (0, 40) and values.dtype == dtype
    assert scales.shape == {PER_TENSOR: (1,), PER_TOKEN: (0, 1), 32: (0, 2), 128: (0, 1)}[group_size]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((torch.int32, PER_TOKEN), ShapeError, "dtype must be torch.float8_e4m3fn or torch.int8, got torch.int32"),
        ((torch.int8, 16), ShapeError, "group_size must be one of 0, -1, 32, 64, 128"),
        ((torch.int8, 32, torch.ones(1)), DTypeError, "scale must be None unless group_size is 0"),
        ((torch.int8, PER_TENSOR, torch.ones(2)), ShapeError, "scale must have size 1"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=f"scaled_quant: {message}"):
        scaled_quant(torch.ones(2, 40), *arguments)


def test_refuses_tokens_without_columns():
    with pytest.raises(ShapeError, match="x must have at least one column"):
        scaled_quant(torch.ones(2, 0), torch.int8, PER_TOKEN)
