"""Every elementwise operation and conversion that Triton's language has, over special values too."""

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

INF, NAN = float("inf"), float("nan")
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16]
WIDE = [torch.float32, torch.float64]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.7, 1e-3, 1e-30, -1e-42, 40.25, -87.0, 1e5, INF, -INF, NAN]


@triton.jit
def _convert(x_ptr, out_ptr, scalar_ptr, ROUNDING: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, first = tl.load(x_ptr + offsets), tl.load(x_ptr)
    to: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, x.to(to, fp_downcast_rounding=ROUNDING))
    tl.store(scalar_ptr, first.to(to, fp_downcast_rounding=ROUNDING))


def _same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit; any NaN equals any other."""
    got, expected = got.contiguous(), expected.contiguous()
    if got.dtype.is_floating_point:
        # Every float here is exact in float64, but for the sign of zero.
        got, expected = got.double().numpy(), expected.double().numpy()
        np.testing.assert_array_equal(np.signbit(got)[got == 0], np.signbit(expected)[expected == 0])
    else:
        got, expected = got.view(torch.int8).numpy(), expected.view(torch.int8).numpy()
    np.testing.assert_array_equal(got, expected)


def _inputs(source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Values that the target can hold after rounding: what lies outside is unspecified for integers."""
    if source.is_floating_point:
        values = torch.cat([torch.tensor(SPECIAL), torch.randn(240) * 2 ** torch.randint(-20, 6, (240,))])
        if not target.is_floating_point:
            limit = 100 if target in (torch.int8, torch.uint8) else 2**14
            values = values.nan_to_num(7, 9, -9).clamp(0 if target in UNSIGNED else -limit, limit)
        if torch.float8_e4m3fn in (source, target):  # torch makes NaN of what lies beyond, Triton the largest
            values = values.nan_to_num(nan=NAN, posinf=440, neginf=-440).clamp(-440, 440)
        if target == torch.bool:
            values = values[values.abs() >= 1]
        return values.to(source)[: 128 if target == torch.bool else 256]
    if source == torch.bool:
        return torch.rand(256) < 0.5
    info = torch.iinfo(source)
    values = torch.randint(max(info.min, -(2**40)), min(info.max, 2**40) + 1, (256,))
    values[:4] = torch.tensor([0, 1, info.min if source not in UNSIGNED else 2, min(info.max, 2**63 - 1)])
    return values.to(source)


def _expected(x: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    if x.dtype in UNSIGNED and target.is_floating_point:  # torch has few conversions of unsigned integers
        return x.long().double().to(target) if target in WIDE else x.long().to(target)
    if target in UNSIGNED:
        return x.to(torch.int64).to(target) if x.dtype != torch.bool else x.to(target)
    return x.to(target)


PAIRS = [
    pair
    for pair in itertools.product([torch.bool, *SIGNED, *UNSIGNED, *SMALL, *WIDE], repeat=2)
    # Triton has no conversion between 8-bit floats and what is no float.
    if not any(dtype in SMALL[:2] for dtype in pair) or all(dtype.is_floating_point for dtype in pair)
]


@pytest.mark.parametrize("source, target", PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_pair_of_types_converts(source, target):
    x = _inputs(source, target)
    n = 1 << (len(x).bit_length() - 1)
    x = x[:n]
    out, first = torch.empty(n, dtype=target), torch.empty(1, dtype=target)
    _convert[(1,)](x, out, first, None, n)
    expected = _expected(x, target)
    _same(out, expected)
    _same(first, expected[:1])


def _next_toward_zero(exact: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """The last value of the target on the way from zero to each value."""
    bits = torch.arange(0, 2 ** (8 * target.itemsize - 1))
    every = bits.to(torch.int8 if target.itemsize == 1 else torch.int16).view(target).double()
    every = every[every.isfinite()]
    magnitude = every[torch.searchsorted(every, exact.abs(), right=True) - 1]
    return torch.where(exact.isfinite(), torch.copysign(magnitude, exact), exact).to(target)


@pytest.mark.parametrize("target", [torch.float8_e5m2, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", WIDE)
def test_rounding_toward_zero(source, target):
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(240) * 2.0 ** torch.randint(-30, 20, (240,))]).to(source)
    x[20:30] = torch.tensor([65519.0, 65520.0, 65504.0, 7e4, 57344.0, 61440.0, 3e38, 6e-8, 5.9e-8, 1e-5])
    out, first = torch.empty(256, dtype=target), torch.empty(1, dtype=target)
    _convert[(1,)](x, out, first, "rtz", 256)
    _same(out, _next_toward_zero(x.double(), target))


@triton.jit
def _unary(x_ptr, out_ptr, scalar_ptr, KIND: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, first = tl.load(x_ptr + offsets), tl.load(x_ptr + 6)
    tl.store(out_ptr + offsets, getattr(tl, KIND)(x))
    tl.store(scalar_ptr, getattr(tl, KIND)(first))


UNARY = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "erf": lambda x: torch.erf(torch.from_numpy(x)).numpy(),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
EXACT = ("sqrt", "sqrt_rn", "abs", "floor", "ceil")


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", UNARY)
def test_math(kind, dtype):
    if kind == "sqrt_rn" and dtype == torch.float64:
        dtype = torch.float32  # Triton has it for fp32 alone
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(48) * 20]).to(dtype)
    out, first = torch.empty_like(x), torch.empty(1, dtype=dtype)
    _unary[(1,)](x, out, first, kind, 64)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(UNARY[kind](x.double().numpy())).to(dtype)
    if kind in EXACT:
        _same(out, expected)
    else:
        limit = 4e-7 if dtype == torch.float32 else 1e-15
        torch.testing.assert_close(out, expected, rtol=limit, atol=limit, equal_nan=True)
        assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
    torch.testing.assert_close(first[0], out[6], rtol=1e-6, atol=0)


@triton.jit
def _floats(x_ptr, y_ptr, out_ptr, KIND: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    if KIND == "add":
        out = x + y
    elif KIND == "subtract":
        out = x - y
    elif KIND == "multiply":
        out = x * y
    elif KIND == "divide":
        out = x / y
    elif KIND == "fdiv":
        out = tl.fdiv(x, y)
    elif KIND == "div_rn":
        out = tl.div_rn(x, y)
    elif KIND == "fmod":
        out = x % y
    elif KIND == "negative":
        out = -x
    elif KIND == "fma":
        out = tl.fma(x, y, x)
    elif KIND == "minimum":
        out = tl.minimum(x, y)
    elif KIND == "maximum":
        out = tl.maximum(x, y)
    elif KIND == "minimum_nan":
        out = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "maximum_nan":
        out = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "clamp":
        out = tl.clamp(x, -1.5, 2.0)
    elif KIND == "clamp_nan":
        out = tl.clamp(x, -1.5, 2.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "less":
        out = (x < y).to(x.dtype)
    elif KIND == "less_equal":
        out = (x <= y).to(x.dtype)
    elif KIND == "greater":
        out = (x > y).to(x.dtype)
    elif KIND == "greater_equal":
        out = (x >= y).to(x.dtype)
    elif KIND == "equal":
        out = (x == y).to(x.dtype)
    elif KIND == "not_equal":
        out = (x != y).to(x.dtype)
    else:
        out = tl.where(x < y, x, y)
    tl.store(out_ptr + offsets, out)


FLOAT_BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "fdiv": np.divide,
    "div_rn": np.divide,
    "fmod": np.fmod,
    "negative": lambda x, y: -x,
    "fma": lambda x, y: (x.astype(np.longdouble) * y + x).astype(x.dtype),
    "minimum": np.fmin,
    "maximum": np.fmax,
    "minimum_nan": np.minimum,
    "maximum_nan": np.maximum,
    "clamp": lambda x, y: np.fmin(np.fmax(x, -1.5), 2.0).astype(x.dtype),
    "clamp_nan": lambda x, y: np.clip(x, -1.5, 2.0).astype(x.dtype),
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "where": lambda x, y: np.where(x < y, x, y),
}
# Of equal zeros either may come out of these; fma is exact in long double for fp32 alone.
ZEROS = ("minimum", "maximum", "minimum_nan", "maximum_nan", "clamp", "clamp_nan")


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", FLOAT_BINARY)
def test_floats(kind, dtype):
    if kind in ("div_rn", "fma"):
        dtype = torch.float32
    values = torch.tensor(SPECIAL)
    x, y = (grid.reshape(-1).to(dtype).contiguous() for grid in torch.meshgrid(values, values, indexing="ij"))
    out = torch.empty_like(x)
    _floats[(1,)](x, y, out, kind, 256)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(np.asarray(FLOAT_BINARY[kind](x.numpy(), y.numpy()))).to(dtype)
    _same(out + 0.0 if kind in ZEROS else out, expected + 0.0 if kind in ZEROS else expected)


@triton.jit
def _integers(x_ptr, y_ptr, out_ptr, KIND: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    if KIND == "add":
        out = x + y
    elif KIND == "subtract":
        out = x - y
    elif KIND == "multiply":
        out = x * y
    elif KIND == "divide":
        out = x // tl.where(y == 0, 1, y).to(y.dtype)
    elif KIND == "remainder":
        out = x % tl.where(y == 0, 1, y).to(y.dtype)
    elif KIND == "and":
        out = x & y
    elif KIND == "or":
        out = x | y
    elif KIND == "xor":
        out = x ^ y
    elif KIND == "not":
        out = ~x
    elif KIND == "left":
        out = x << (y & 7)
    elif KIND == "right":
        out = x >> (y & 7)
    elif KIND == "minimum":
        out = tl.minimum(x, y)
    elif KIND == "maximum":
        out = tl.maximum(x, y)
    elif KIND == "less":
        out = (x < y).to(x.dtype)
    elif KIND == "less_equal":
        out = (x <= y).to(x.dtype)
    elif KIND == "greater":
        out = (x > y).to(x.dtype)
    elif KIND == "greater_equal":
        out = (x >= y).to(x.dtype)
    elif KIND == "equal":
        out = (x == y).to(x.dtype)
    elif KIND == "abs":
        out = tl.abs(x)
    elif KIND == "cdiv":
        out = tl.cdiv(x & 63, (y & 15) + 1)
    else:
        out = tl.umulhi(x, y)
    tl.store(out_ptr + offsets, out)


def _quotient(x, y):
    y = np.where(y == 0, 1, y).astype(y.dtype)
    wide = np.abs(x.astype(object)) // np.abs(y.astype(object))
    return np.where((x.astype(object) < 0) != (y.astype(object) < 0), -wide, wide)


INTEGER_BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": _quotient,
    "remainder": lambda x, y: x.astype(object) - _quotient(x, y) * np.where(y == 0, 1, y),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": lambda x, y: ~x,
    "left": lambda x, y: x << (y & 7),
    "right": lambda x, y: x >> (y & 7),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "abs": lambda x, y: np.abs(x),
    "cdiv": lambda x, y: ((x & 63) + (y & 15)) // ((y & 15) + 1),
    "umulhi": lambda x, y: (x.astype(object) % 2 ** (8 * x.itemsize)) * (y.astype(object) % 2 ** (8 * x.itemsize)),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint16, torch.uint32], ids=str)
@pytest.mark.parametrize("kind", INTEGER_BINARY)
def test_integers(kind, dtype):
    if kind == "umulhi" and dtype.itemsize < 4:
        dtype = torch.uint32  # Triton has it for 32 and 64 bits
    info = torch.iinfo(dtype)
    numpy_dtype = np.dtype(str(dtype).removeprefix("torch."))
    x, y = np.random.default_rng(3).integers(info.min, info.max, (2, 256), dtype=numpy_dtype, endpoint=True)
    x[:4], y[:2], y[4:20] = [info.min, info.max, 0, 1], [1, 3], np.arange(16)
    out = np.empty_like(x)
    _integers[(1,)](*(torch.from_numpy(array) for array in (x, y, out)), kind, 256)
    with np.errstate(all="ignore"):
        expected = np.asarray(INTEGER_BINARY[kind](x, y))
    if kind == "umulhi":
        expected = expected >> (8 * x.itemsize)
    mask = 2 ** (8 * x.itemsize) - 1
    assert [int(value) & mask for value in out] == [int(value) & mask for value in expected]
