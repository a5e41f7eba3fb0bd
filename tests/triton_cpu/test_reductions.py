"""Reductions by every operation that has a neutral start, and by regions that have none."""

import functools
import math
import operator

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _multiply(x, y):
    return x * y


@triton.jit
def _or(x, y):
    return x | y


@triton.jit
def _and(x, y):
    return x & y


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _twice_the_product(x, y):
    return x * y * 2


@triton.jit
def _reduced(x, HOW: tl.constexpr):
    if HOW == "sum":
        return tl.reduce(x, 0, tl.standard._sum_combine)
    elif HOW == "product":
        return tl.reduce(x, 0, _multiply)
    elif HOW == "or":
        return tl.reduce(x, 0, _or)
    elif HOW == "and":
        return tl.reduce(x, 0, _and)
    elif HOW == "xor":
        return tl.xor_sum(x, 0)
    elif HOW == "max":
        return tl.max(x, 0)
    elif HOW == "min":
        return tl.min(x, 0)
    elif HOW == "maximum":
        return tl.reduce(x, 0, _maximum)
    elif HOW == "minimum":
        return tl.reduce(x, 0, _minimum)
    else:
        tl.static_assert(HOW == "twice the product")
        return tl.reduce(x, 0, _twice_the_product)


@triton.jit
def _reduce(x_ptr, out_ptr, N: tl.constexpr, HOW: tl.constexpr, UNSIGNED: tl.constexpr):
    """Twice, of values in the opposite order, by what is one function in the code."""
    for turn in tl.static_range(2):
        places = tl.arange(0, N) if turn == 0 else N - 1 - tl.arange(0, N)
        x = tl.load(x_ptr + places)
        if UNSIGNED:
            x = x.to(tl.uint32, bitcast=True)
        tl.store(out_ptr + turn, _reduced(x, HOW))


def _run(x: torch.Tensor, how: str, unsigned: bool = False) -> torch.Tensor:
    out = torch.empty(2, dtype=x.dtype)
    _reduce[(1,)](x, out, len(x), how, unsigned)
    return out


@pytest.mark.parametrize("how", ["sum", "product", "max", "min", "maximum", "minimum"])
@pytest.mark.parametrize("value", [-0.0, 0.0, 1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("n", [16, 32, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_equal_floats_give_what_two_of_them_give(how, value, n, dtype):
    """A start that is not neutral, such as the 0 of a sum, would show: 0.0 + -0.0 is 0.0."""
    out = _run(torch.full((n,), value, dtype=dtype), how).tolist()
    expected = {"sum": n * value, "product": value**n}.get(how, value)
    assert out == [expected] * 2 or all(map(math.isnan, [*out, expected]))
    assert math.isnan(expected) or [math.copysign(1, number) for number in out] == [math.copysign(1, expected)] * 2


@pytest.mark.parametrize("how", ["max", "min", "maximum", "minimum"])
def test_one_nan_is_passed_over_or_passed_on(how):
    x = torch.randn(256)
    x[77] = math.nan
    passed_over = {"max": x.nan_to_num(-9).max(), "min": x.nan_to_num(9).min()}
    out = _run(x, how)
    assert torch.equal(out, passed_over[how].expand(2)) if how in passed_over else out.isnan().all()


@pytest.mark.parametrize("how", ["sum", "product", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("n", [16, 256])
def test_integers(how, dtype, n):
    ends = torch.iinfo(dtype)
    for low, high in ((ends.min, ends.min + 9), (ends.max - 9, ends.max), (-9, 9)):
        x = torch.randint(low, high, (n,), dtype=dtype)
        expected = {"sum": x.sum, "product": x.prod, "max": x.amax, "min": x.amin}[how]().to(dtype)
        assert torch.equal(_run(x, how), expected.expand(2))


@pytest.mark.parametrize("how", ["max", "min", "and", "or", "xor"])
@pytest.mark.parametrize("n", [16, 256])
def test_bits(how, n):
    reduce = {"max": max, "min": min, "and": operator.and_, "or": operator.or_, "xor": operator.xor}[how]
    for low, high in ((0, 9), (-(2**31), 2**31 - 1), (-9, -1)):
        x = torch.randint(low, high, (n,), dtype=torch.int32)
        expected = functools.reduce(reduce, [number % 2**32 for number in x.tolist()])
        assert [number % 2**32 for number in _run(x, how, unsigned=True).tolist()] == [expected] * 2


@pytest.mark.parametrize("n", [16, 256])
def test_a_region_without_a_neutral_start(n):
    signs = torch.randint(0, 2, (n,)).float() * 2 - 1
    assert torch.equal(_run(signs, "twice the product"), (signs.double().prod() * 2.0 ** (n - 1)).float().expand(2))
