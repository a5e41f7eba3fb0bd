import pytest
import torch

from vllm_triton.ops import scaled_mm, scaled_quant
from vllm_triton.ops.errors import DTypeError, ShapeError
from vllm_triton.ops.linear.kernel import GROUP_T
from vllm_triton.ops.scaled_mm.kernel import select_config
from vllm_triton.ops.scaled_quant import PER_TENSOR, PER_TOKEN

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(scaled_mm.implementations))
DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])


def _whole(dtype, *shape):
    """Small whole numbers, which both dtypes hold exactly."""
    return torch.randint(-4, 5, shape).to(dtype)


def _powers(*shape):
    return 2.0 ** torch.randint(-3, 3, shape)


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("a_rows, weight_rows", [(1, 1), (5, 1), (1, 70), (5, 70)])
@pytest.mark.parametrize("has_axis", [False, True])
def test_scales_of_whole_rows_are_exact(implementation, dtype, a_rows, weight_rows, has_axis):
    a, weight, bias = _whole(dtype, 5, 200), _whole(dtype, 70, 200), torch.randint(-9, 9, (70,)).float()
    a_scale, weight_scale = _powers(a_rows, 1), _powers(weight_rows, 1)
    scales = (a_scale, weight_scale) if has_axis else (a_scale[:, 0], weight_scale[:, 0])
    out = scaled_mm.implementations[implementation](a, weight, *scales, torch.float32, bias)
    assert torch.equal(out, a.float() @ weight.float().T * a_scale * weight_scale.T + bias)


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("num_columns, depth", [(128, 128), (200, 300), (129, 100), (100, 257), (300, 129)])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_scales_of_blocks_are_exact(implementation, dtype, num_columns, depth, num_tokens):
    """Each block by its own scales, also the short ones at the ends."""
    a, weight = _whole(dtype, num_tokens, depth), _whole(dtype, num_columns, depth)
    rows, columns = -(-num_columns // 128), -(-depth // 128)
    a_scale, weight_scale = _powers(num_tokens, columns), _powers(rows, columns)
    out = scaled_mm.implementations[implementation](a, weight, a_scale, weight_scale, torch.float32)
    expected = torch.zeros(num_tokens, num_columns)
    for row in range(rows):
        for column in range(columns):
            outputs, inputs = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            product = a[:, inputs].float() @ weight[outputs, inputs].float().T
            expected[:, outputs] += product * a_scale[:, column, None] * weight_scale[row, column]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("num_tokens", [1, 6, 40])
@pytest.mark.parametrize("value_a, value_weight", [(-128, -128), (127, -128), (127, 127)])
def test_int8_sums_are_whole_numbers_beyond_what_float32_counts(num_tokens, value_a, value_weight):
    a = torch.full((num_tokens, 4099), value_a, dtype=torch.int8)
    weight = torch.full((20, 4099), value_weight, dtype=torch.int8)
    weight[:, 5] = 1
    exact = value_a * value_weight * 4098 + value_a
    out = scaled_mm.implementations["triton"](a, weight, torch.ones(1), torch.ones(1), torch.float32)
    assert abs(exact) > 2**24 and (out == torch.tensor(float(exact))).all()


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize("group_size", [PER_TENSOR, PER_TOKEN])
def test_of_quantized_operands_is_near_the_product(implementation, dtype, group_size):
    x, weight = torch.randn(24, 512), torch.randn(70, 512)
    a, a_scale = scaled_quant(x, dtype, group_size)
    quants, weight_scale = scaled_quant(weight, dtype, group_size)
    out = scaled_mm.implementations[implementation](a, quants, a_scale, weight_scale, torch.float32)
    error = (out - x @ weight.T).square().mean().sqrt() / (x @ weight.T).square().mean().sqrt()
    # A value's error is uniform over a step of 1/127 of the largest, or over 1/8 of its power of two.
    assert error < (0.02 if dtype == torch.int8 else 0.05)


@IMPLEMENTATIONS
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_result_is_rounded_to_its_dtype_once(implementation, out_dtype):
    """3 * 7 * 2^-3 + 0.5 and the like are whole eighths, and 1025 / 8 is a tie in bfloat16."""
    a, weight = torch.tensor([[3], [100]], dtype=torch.int8), torch.tensor([[7], [10]], dtype=torch.int8)
    bias = torch.tensor([0.5, 3.125]).to(out_dtype)
    scales = torch.tensor([0.25]), torch.tensor([0.5])
    out = scaled_mm.implementations[implementation](a, weight, *scales, out_dtype, bias)
    exact = torch.tensor([[21.0, 30.0], [700.0, 1000.0]]) / 8 + bias.float()
    assert out.dtype == out_dtype
    torch.testing.assert_close(out, exact.to(out_dtype), rtol=torch.finfo(out_dtype).eps, atol=0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("has_blocks", [False, True])
def test_tokens_do_not_depend_on_each_other(implementation, has_blocks):
    a, weight = _whole(torch.int8, 9, 200), _whole(torch.int8, 150, 200)
    a_scale, weight_scale = (_powers(9, 2), _powers(2, 2)) if has_blocks else (_powers(9, 1), _powers(150, 1))
    multiply = scaled_mm.implementations[implementation]
    order = torch.tensor([4, 0, 8, 2])
    some = multiply(a[order], weight, a_scale[order], weight_scale, torch.float32)
    assert torch.equal(multiply(a, weight, a_scale, weight_scale, torch.float32)[order], some)


@IMPLEMENTATIONS
def test_no_tokens(implementation):
    a, weight = _whole(torch.int8, 0, 20), _whole(torch.int8, 7, 20)
    out = scaled_mm.implementations[implementation](a, weight, torch.ones(0, 1), torch.ones(1), torch.float16)
    assert out.shape == (0, 7) and out.dtype == torch.float16


def test_tiles_in_grouped_order_cover_the_result():
    """More tile rows than a group, and a last group that is not full."""
    num_tokens = (GROUP_T + 1) * select_config(1024).block_t + 5
    a, weight, scales = _whole(torch.int8, num_tokens, 16), _whole(torch.int8, 130, 16), (torch.ones(1), torch.ones(1))
    out = scaled_mm.implementations["triton"](a, weight, *scales, torch.float32)
    assert torch.equal(out, a.float() @ weight.float().T)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 65, 8192])
def test_tiles_fit_shared_memory_and_blocks(num_tokens):
    config = select_config(num_tokens)
    assert (config.block_t + config.block_n) * config.block_k * config.num_stages <= 64 * 1024
    assert max(config.block_n, config.block_k) <= 128 and min(config.block_t, config.block_n, config.block_k) >= 16


def _arguments(**changed):
    arguments = {
        "a": torch.ones(2, 300, dtype=torch.int8),
        "weight": torch.ones(200, 300, dtype=torch.int8),
        "a_scale": torch.ones(2, 1),
        "weight_scale": torch.ones(200, 1),
        "out_dtype": torch.float16,
        "bias": None,
    }
    return (arguments | changed).values()


@pytest.mark.parametrize(
    "changed, error, message",
    [
        ({"a_scale": torch.ones(3, 1)}, ShapeError, "a_scale must have 1 row or T = 2, got 3"),
        (
            {"weight_scale": torch.ones(7, 1)},
            ShapeError,
            r"weight_scale must have shape \[1\], \[200, 1\] or, for blocks of 128 x 128, \[2, 3\], got \[7, 1\]",
        ),
        ({"weight_scale": torch.ones(2, 3)}, ShapeError, "weight_scale must have size Q. = 1 in axis 1"),
        ({"weight_scale": torch.ones(2, 3), "a_scale": torch.ones(2)}, DTypeError, "a_scale must have as many columns"),
        ({"weight": torch.ones(200, 300).to(torch.float8_e4m3fn)}, DTypeError, "weight must have the dtype of a"),
        (
            {"bias": torch.ones(200)},
            DTypeError,
            "bias must have the dtype of out_dtype, torch.float16, got torch.float32",
        ),
        ({"out_dtype": torch.int8}, ShapeError, "out_dtype must be float16, bfloat16 or float32, got torch.int8"),
    ],
)
def test_refuses(changed, error, message):
    scaled_mm.contract.check(tuple(_arguments()))
    with pytest.raises(error, match=f"scaled_mm: {message}"):
        scaled_mm(*_arguments(**changed))


def test_refuses_int8_sums_that_could_overflow():
    a, weight = torch.empty(1, 2**17, dtype=torch.int8), torch.empty(1, 2**17, dtype=torch.int8)
    with pytest.raises(DTypeError, match="a must have at most 131071 columns in int8"):
        scaled_mm(a, weight, torch.ones(1), torch.ones(1), torch.float32)
