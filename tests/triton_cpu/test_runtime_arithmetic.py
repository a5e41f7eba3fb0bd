"""Comparisons, integer arithmetic, minimum and maximum, reductions of the runtime, for every instruction set."""

import numpy as np
import pytest
import runtime_library as rt

INTEGERS = {
    f"{'u' if unsigned else ''}int{bits}_t": np.dtype(f"{'u' if unsigned else 'i'}{bits // 8}").type
    for bits in (8, 16, 32, 64)
    for unsigned in (False, True)
}
FLOATS = {"float": np.float32, "double": np.float64}
BOTH = INTEGERS | FLOATS
NUMPY_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
EXTREMA = ("minimum", "maximum", "minnum", "maxnum")


def _source() -> str:
    text = ""
    for name in BOTH:
        kinds = list(NUMPY_COMPARISONS)
        if name in FLOATS:
            kinds += ["ult", "ule", "ugt", "uge", "ueq", "une", "one", "ord", "uno"]
        for kind in kinds:
            text += rt.binary(f"{kind}_{name}", name, f"tcpu::cmp_{kind}(x, y)", "int32_t")
        text += rt.binary(f"select_{name}", name, "tcpu::select(tcpu::cmp_lt(x, y), x, y)")
        text += (
            f'extern "C" void reduce_{name}(const {name}* in, {name}* out) {{ const auto x = load(in);'
            " out[0] = tcpu::sum(x); out[1] = tcpu::maximum_lane(x); out[2] = tcpu::minimum_lane(x);"
            " out[3] = tcpu::reduce(x, [](auto a, auto b) { return a - b; }); }\n"
        )
    for name in FLOATS:
        for kind in EXTREMA:
            text += rt.binary(f"{kind}_{name}", name, f"tcpu::{kind}(x, y)")
            text += rt.scalar_binary(f"{kind}_{name}_scalar", name, f"tcpu::{kind}(x, y)")
        text += rt.unary(f"clamp_{name}", name, "tcpu::clamp(x, -2, 3)")
        text += rt.scalar_unary(f"clamp_{name}_scalar", name, "tcpu::clamp(x, -2, 3)")
    for name in INTEGERS:
        kinds = ["div", "rem", "min", "max", "shl", "shr"] + (["mulhi"] if "32" in name or "64" in name else [])
        for kind in kinds:
            text += rt.binary(f"{kind}_{name}", name, f"tcpu::{kind}(x, y)")
            text += rt.scalar_binary(f"{kind}_{name}_scalar", name, f"tcpu::{kind}(x, y)")
        for kind in ("popc", "clz", "ffs", "abs"):
            text += rt.unary(f"{kind}_{name}", name, f"tcpu::{kind}(x)")
            text += rt.scalar_unary(f"{kind}_{name}_scalar", name, f"tcpu::{kind}(x)")
    return (
        text
        + """
extern "C" void masks(int64_t n, int64_t bits, uint32_t* out) {
  out[0] = movemask(lanes_below(n));
  out[1] = bits_below(n);
  out[2] = movemask(frommask(bits));
  out[3] = any(frommask(bits));
  out[4] = all(frommask(bits));
}
"""
    )


@pytest.fixture(params=rt.LEVELS_BESIDE_DOT, scope="module")
def library(request):
    return rt.build(_source(), request.param)


def _values(dtype: type) -> np.ndarray:
    if np.issubdtype(dtype, np.floating):
        return rt.SPECIAL_FLOATS.astype(dtype)
    info = np.iinfo(dtype)
    edges = {info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7, 10, 100, info.max // 3, info.min // 5}
    edges |= {-1, -2, -3, -10} if info.min < 0 else set()
    edges |= {2**k for k in range(8 * dtype().itemsize - 1)}
    random = np.random.default_rng(17).integers(info.min, info.max, 40, dtype=dtype)
    return np.concatenate([np.array(sorted(edges), dtype), random])


def _both(library, name: str, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    results = [np.empty_like(a), np.empty_like(a)]
    for function, result in zip((name, f"{name}_scalar"), results, strict=True):
        rt.function(library, function)(a, b, result, len(a))
    return results


@pytest.mark.parametrize("name", BOTH)
def test_comparisons_and_select(library, name):
    a, b = rt.pairs(_values(BOTH[name]))
    unordered = np.isnan(a) | np.isnan(b) if name in FLOATS else np.zeros(len(a), bool)
    expected = {kind: compare(a, b) for kind, compare in NUMPY_COMPARISONS.items()}
    expected["select"] = np.where(a < b, a, b)
    if name in FLOATS:
        expected |= {f"u{kind}": expected[kind] | unordered for kind in ("lt", "le", "gt", "ge", "eq")}
        expected |= {"une": expected["ne"], "one": expected["ne"] & ~unordered, "ord": ~unordered, "uno": unordered}
    for kind, wanted in expected.items():
        result = np.empty(len(a), BOTH[name] if kind == "select" else np.int32)
        rt.function(library, f"{kind}_{name}")(a, b, result, len(a))
        rt.same(result, wanted if kind == "select" else -wanted.astype(np.int32))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", EXTREMA)
def test_extrema_know_nan_and_signed_zero(library, name, kind):
    a, b = rt.pairs(_values(FLOATS[name]))
    largest = kind.startswith("max")
    above = (a > b) | ((a == b) & ~np.signbit(a))  # +0 lies above -0
    expected = np.where(above == largest, a, b)
    if kind.endswith("num"):
        expected = np.where(np.isnan(a), b, np.where(np.isnan(b), a, expected))
    else:
        expected = np.where(np.isnan(a) | np.isnan(b), FLOATS[name](np.nan), expected)
    for result in _both(library, f"{kind}_{name}", a, b):
        rt.same(result, expected)


@pytest.mark.parametrize("name", FLOATS)
def test_clamp_keeps_nan(library, name):
    x = rt.padded(_values(FLOATS[name]))
    for function in (f"clamp_{name}", f"clamp_{name}_scalar"):
        result = np.empty_like(x)
        rt.function(library, function)(x, result, len(x))
        rt.same(result, np.clip(x, -2, 3))


def _wrap(value: int, dtype: type) -> int:
    bits = 8 * dtype().itemsize
    value &= 2**bits - 1
    return value - 2**bits if np.iinfo(dtype).min < 0 and value >> (bits - 1) else value


def _truncated_division(x: int, y: int) -> int:
    if y == 0:
        return -1
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_arithmetic(library, name):
    dtype = INTEGERS[name]
    width = 8 * dtype().itemsize
    a, b = rt.pairs(_values(dtype))
    exact = {
        "div": _truncated_division,
        "rem": lambda x, y: x - y * _truncated_division(x, y),
        "min": min,
        "max": max,
        "shl": lambda x, y: x << y if 0 <= y < width else 0,
        "shr": lambda x, y: x >> y if 0 <= y < width else (-1 if x < 0 else 0),
    }
    if width >= 32:
        exact["mulhi"] = lambda x, y: (x * y) >> width
    for kind, function in exact.items():
        expected = [_wrap(function(x, y), dtype) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        for result in _both(library, f"{kind}_{name}", a, b):
            np.testing.assert_array_equal(result, np.array(expected, dtype), err_msg=kind)


@pytest.mark.parametrize("name", INTEGERS)
def test_bit_counts_and_abs(library, name):
    dtype = INTEGERS[name]
    width = 8 * dtype().itemsize
    x = rt.padded(_values(dtype))
    unsigned = [value % 2**width for value in x.tolist()]
    expected = {
        "popc": [value.bit_count() for value in unsigned],
        "clz": [width - value.bit_length() for value in unsigned],
        "ffs": [(value & -value).bit_length() for value in unsigned],
        "abs": [_wrap(abs(value), dtype) for value in x.tolist()],
    }
    for kind, wanted in expected.items():
        for function in (f"{kind}_{name}", f"{kind}_{name}_scalar"):
            result = np.empty_like(x)
            rt.function(library, function)(x, result, len(x))
            np.testing.assert_array_equal(result, np.array(wanted, dtype), err_msg=function)


def _tree(x: np.ndarray) -> np.ndarray:
    while len(x) > 1:
        x = x[: len(x) // 2] - x[len(x) // 2 :]
    return x[0]


@pytest.mark.parametrize("name", BOTH)
def test_reductions_take_one_order(library, name):
    dtype = BOTH[name]
    generator = np.random.default_rng(19)
    for _ in range(20):
        if name in FLOATS:
            x = generator.normal(0, 100, 16).astype(dtype)
            total = x.copy()
            while len(total) > 1:
                total = total[: len(total) // 2] + total[len(total) // 2 :]
            expected = [total[0], x.max(), x.min()]
        else:
            info = np.iinfo(dtype)
            x = generator.integers(info.min, info.max, 16, dtype=dtype)
            expected = [_wrap(sum(x.tolist()), dtype), x.max(), x.min()]
        with np.errstate(over="ignore"):
            expected.append(_tree(x))
        result = np.empty(4, dtype)
        rt.function(library, f"reduce_{name}")(x, result)
        rt.same(result, np.array(expected, dtype))


@pytest.mark.parametrize("name", FLOATS)
def test_lane_extrema_pass_over_nan(library, name):
    x = np.full(16, np.nan, FLOATS[name])
    x[[3, 9]] = [-4, 7]
    result = np.empty(4, FLOATS[name])
    rt.function(library, f"reduce_{name}")(x, result)
    assert result[1] == 7 and result[2] == -4 and np.isnan(result[0])


def test_masks(library):
    for n in (-(2**40), -1, 0, 1, 7, 8, 15, 16, 17, 2**40):
        for bits in (0, 1, 0x8000, 0x5A3C, 0xFFFF):
            out = np.empty(5, np.uint32)
            rt.function(library, "masks")(n, bits, out)
            below = 2 ** min(max(n, 0), 16) - 1
            assert out.tolist() == [below, below, bits, bits != 0, bits == 0xFFFF]
