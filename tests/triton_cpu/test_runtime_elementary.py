"""Elementary functions of the runtime against float64, for every instruction set."""

import numpy as np
import pytest
import runtime_library as rt
import torch

UNIFORM = np.random.default_rng(1)


def _near_and_far(near: float, far: float) -> np.ndarray:
    return np.concatenate([UNIFORM.uniform(-near, near, 40000), UNIFORM.uniform(-far, far, 20000)])


# name -> (function in float64, allowed error in ulp, inputs beside the special values)
FLOAT_FUNCTIONS = {
    "exp": (torch.exp, 2.0, UNIFORM.uniform(-106, 90, 60000)),
    "exp2": (torch.exp2, 2.0, UNIFORM.uniform(-152, 130, 60000)),
    "log": (torch.log, 2.0, np.exp(UNIFORM.uniform(-103, 88, 60000))),
    "log2": (
        torch.log2,
        2.0,
        np.concatenate([UNIFORM.uniform(0.5, 2, 40000), np.exp(UNIFORM.uniform(-103, 88, 20000))]),
    ),
    "tanh": (torch.tanh, 3.0, UNIFORM.uniform(-10, 10, 60000)),
    "erf": (torch.erf, 3.0, UNIFORM.uniform(-5, 5, 60000)),
    "sin": (torch.sin, 3.0, _near_and_far(7, 2e6)),
    "cos": (torch.cos, 3.0, _near_and_far(7, 2e6)),
    "sqrt": (torch.sqrt, 0.501, np.exp(UNIFORM.uniform(-100, 88, 10000))),
    "rsqrt": (lambda x: 1 / torch.sqrt(x), 1.6, np.exp(UNIFORM.uniform(-86, 88, 10000))),
    "floor": (torch.floor, 0.0, UNIFORM.uniform(-9, 9, 4000)),
    "ceil": (torch.ceil, 0.0, UNIFORM.uniform(-9, 9, 4000)),
    "trunc": (torch.trunc, 0.0, UNIFORM.uniform(-9, 9, 4000)),
    "rint": (torch.round, 0.0, UNIFORM.integers(-19, 19, 4000) / 2),
    "abs": (torch.abs, 0.0, UNIFORM.uniform(-9, 9, 4000)),
    "expm1": (torch.expm1, 1.5, UNIFORM.uniform(-9, 9, 4000)),
    "log1p": (torch.log1p, 1.5, UNIFORM.uniform(-1, 9, 4000)),
}
SOURCE = "".join(
    rt.unary(f"{name}_vector", "float", f"tcpu::{name}(x)")
    + rt.scalar_unary(f"{name}_scalar", "float", f"tcpu::{name}(x)")
    + rt.unary(f"{name}_double", "double", f"tcpu::{name}(x)")
    for name in FLOAT_FUNCTIONS
)
SOURCE += rt.binary("pow_vector", "float", "tcpu::pow(x, y)") + rt.binary("rem_vector", "float", "tcpu::rem(x, y)")
SOURCE += """
extern "C" void fma_vector(const float* a, const float* b, const float* c, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store(out + i, tcpu::fma(load(a + i), load(b + i), load(c + i)));
}
extern "C" void fma_double(const double* a, const double* b, const double* c, double* out, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store(out + i, tcpu::fma(load(a + i), load(b + i), load(c + i)));
}
"""


@pytest.fixture(params=rt.LEVELS_BESIDE_DOT, scope="module")
def library(request):
    return rt.build(SOURCE, request.param)


def ulps(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Errors in units of the last place of float32 at the exact value; subnormals share one unit."""
    exponent = np.frexp(np.maximum(np.abs(exact), 2.0**-126))[1]
    unit = np.ldexp(1.0, exponent - 24)
    return np.abs(actual.astype(np.float64) - exact) / unit


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_float_functions_are_accurate(library, name):
    function, allowed, inputs = FLOAT_FUNCTIONS[name]
    x = rt.padded(np.concatenate([rt.SPECIAL_FLOATS, inputs.astype(np.float32)]))
    exact = function(torch.from_numpy(x.astype(np.float64))).numpy()
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    result = np.empty_like(x)
    rt.function(library, f"{name}_vector")(x, result, len(x))
    finite = np.isfinite(rounded)
    rt.same(result[~finite], rounded[~finite])
    error = ulps(result[finite], exact[finite])
    worst = error.argmax()
    assert error[worst] <= allowed, f"{name}({x[finite][worst]!r}) is off by {error[worst]} ulp"
    zero = rounded == 0
    np.testing.assert_array_equal(np.signbit(result[zero]), np.signbit(rounded[zero]))


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_a_scalar_has_the_vectors_result(library, name):
    x = rt.some_floats(3, 2000)
    vector, scalar = np.empty_like(x), np.empty_like(x)
    rt.function(library, f"{name}_vector")(x, vector, len(x))
    rt.function(library, f"{name}_scalar")(x, scalar, len(x))
    rt.same(scalar, vector)


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_double_functions(library, name):
    x = rt.padded(np.concatenate([rt.SPECIAL_FLOATS, np.random.default_rng(2).normal(0, 4, 500)]).astype(np.float64))
    result = np.empty_like(x)
    rt.function(library, f"{name}_double")(x, result, len(x))
    expected = FLOAT_FUNCTIONS[name][0](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-14, atol=0)
    np.testing.assert_array_equal(np.signbit(result[expected == 0]), np.signbit(expected[expected == 0]))


def test_pow_and_remainder(library):
    a, b = rt.pairs(np.concatenate([rt.SPECIAL_FLOATS, np.array([2, -3, 10, 0.25, -1.5], np.float32)]))
    for name, function in (("pow_vector", np.power), ("rem_vector", np.fmod)):
        result = np.empty_like(a)
        rt.function(library, name)(a, b, result, len(a))
        with np.errstate(all="ignore"):
            exact = function(a.astype(np.float64), b.astype(np.float64))
            rounded = exact.astype(np.float32)
        finite = np.isfinite(rounded)
        rt.same(result[~finite], rounded[~finite])
        assert ulps(result[finite], exact[finite]).max() <= 1.5, name


def test_fma_rounds_once(library):
    generator = np.random.default_rng(5)
    a = (1 + generator.integers(0, 2**23, 4096) * 2.0**-23).astype(np.float32)
    b = (1 + generator.integers(0, 2**23, 4096) * 2.0**-23).astype(np.float32)
    c = -(a * b)  # what remains is the product's rounding error
    result = np.empty_like(a)
    rt.function(library, "fma_vector")(a, b, c, result, len(a))
    expected = (a.astype(np.float64) * b + c).astype(np.float32)  # exact in float64
    assert np.count_nonzero(expected) > 1000
    rt.same(result, expected)
    wide = np.full(16, 1 + 2.0**-52)
    result = np.empty_like(wide)
    rt.function(library, "fma_double")(wide, wide, -(wide * wide), result, 16)
    rt.same(result, np.full(16, 2.0**-104))
