"""Matrix products of the runtime against float64, for every instruction set, type and layout."""

import numpy as np
import pytest
import runtime_library as rt
import torch

STORAGE = {
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "double": torch.float64,
    "int8_t": torch.int8,
}
SUMS = {"double": torch.float64, "int8_t": torch.int32}
PAIRS = [(name, name) for name in STORAGE if not name.startswith("f8")] + [("bf16", "f8e4m3"), ("f16", "f8e5m2")]
PAIRS += [("f8e4m3", "f8e4m3"), ("f8e5m2", "f8e5m2")]
SIZES = [(1, 1, 1), (1, 64, 576), (2, 7, 33), (3, 40, 65), (4, 16, 16), (5, 33, 31), (8, 64, 64), (16, 32, 130)]
SIZES += [(17, 19, 3), (70, 35, 300), (64, 64, 64), (1, 100, 530), (0, 5, 5), (5, 0, 5), (5, 5, 0)]


def _source() -> str:
    text = ""
    for a, b in PAIRS:
        function = {"double": "dot_f64", "int8_t": "dot_i32"}.get(a, "dot_f32")
        total = {"double": "double", "int8_t": "int32_t"}.get(a, "float")
        text += (
            f'extern "C" void dot_{a}_{b}({total}* c, int64_t ldc, const {a}* x, int64_t lda, int64_t at, const {b}* y,'
            " int64_t ldb, int64_t bt, int64_t m, int64_t n, int64_t k) {"
            f" {function}(c, ldc, x, lda, at, y, ldb, bt, m, n, k); }}\n"
        )
    return text


@pytest.fixture(params=rt.LEVELS, scope="module")
def library(request):
    return rt.build(_source(), request.param)


def _draw(generator: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=dtype)
    return torch.randn((rows, columns), generator=generator, dtype=torch.float32).to(dtype)


def _guarded(matrix: torch.Tensor, transposed: bool, extra: int) -> tuple[np.ndarray, int]:
    """The matrix's bytes as the kernel sees them, rows `extra` elements longer and full of what must not be read."""
    stored = matrix.t() if transposed else matrix
    poison = float("nan") if matrix.dtype.is_floating_point else 77
    wide = torch.full((stored.shape[0] + 1, stored.shape[1] + extra), poison, dtype=torch.float32).to(matrix.dtype)
    wide[: stored.shape[0], : stored.shape[1]] = stored
    return wide.view(torch.uint8).numpy().reshape(-1), stored.shape[1] + extra


def _run(library, names, a, b, c, at=False, bt=False, extra=3):
    a_bytes, lda = _guarded(a, at, extra)
    b_bytes, ldb = _guarded(b, bt, extra)
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    call = rt.function(library, f"dot_{names[0]}_{names[1]}")
    call(c, c.shape[1], a_bytes, lda, int(at), b_bytes, ldb, int(bt), m, n, k)


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_dot_matches_float64(library, names):
    generator = torch.Generator().manual_seed(7)
    sum_type = SUMS.get(names[0], torch.float32)
    for m, n, k in SIZES:
        for at, bt in ((False, False), (False, True), (True, False), (True, True)):
            a, b = _draw(generator, m, k, STORAGE[names[0]]), _draw(generator, k, n, STORAGE[names[1]])
            start = torch.arange((m + 1) * (n + 2)).reshape(m + 1, n + 2).remainder(5).to(sum_type)
            c = start.clone().numpy()
            _run(library, names, a, b, c, at, bt)
            wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
            exact = start.to(torch.float64)
            exact[:m, :n] += wide_a @ wide_b
            magnitude = torch.ones_like(exact)
            magnitude[:m, :n] += wide_a.abs() @ wide_b.abs()
            unit = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.int32: 0.0}[sum_type]
            error = np.abs(c.astype(np.float64) - exact.numpy())
            allowed = magnitude.numpy() * unit * (2 + k / 16)
            assert (error <= allowed).all(), (names, m, n, k, at, bt, float(error.max()))


@pytest.mark.parametrize("names", [("float", "float"), ("bf16", "bf16"), ("f16", "f16")], ids="-".join)
@pytest.mark.parametrize("m", [1, 4, 20])
@pytest.mark.parametrize("transposed", [False, True])
def test_dot_keeps_nan_and_infinity(library, names, m, transposed):
    n, k = 37, 45
    a = torch.zeros(m, k, dtype=STORAGE[names[0]])
    b = torch.ones(k, n, dtype=STORAGE[names[1]])
    b[3, 5] = float("inf")  # 0 * inf
    b[44, 6] = float("nan")
    a[0, 9] = float("-inf")
    b[9, 7] = 0
    c = np.zeros((m, n), np.float32)
    _run(library, names, a, b, c, bt=transposed)
    with np.errstate(invalid="ignore"):
        expected = (a.double() @ b.double()).numpy().astype(np.float32)
    assert np.isnan(expected[:, 5]).all() and np.isnan(expected[0, 7]) and expected[0, 8] == -np.inf
    rt.same(c.reshape(-1), expected.reshape(-1))


def test_int8_extremes_do_not_saturate(library):
    for value_a, value_b in ((-128, -128), (127, -128), (-128, 127), (127, 127)):
        a = torch.full((9, 512), value_a, dtype=torch.int8)
        b = torch.full((512, 17), value_b, dtype=torch.int8)
        c = np.zeros((9, 17), np.int32)
        _run(library, ("int8_t", "int8_t"), a, b, c)
        np.testing.assert_array_equal(c, np.full((9, 17), value_a * value_b * 512, np.int32))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["f8e4m3", "f8e5m2"])
def test_every_small_float_is_multiplied_as_what_it_is(library, name, transposed):
    """Each of the 256, subnormal and not finite, by 1: as rows of the left side, and as columns of the right."""
    values = torch.arange(256, dtype=torch.uint8).view(STORAGE[name])
    ones = torch.ones(3, dtype=torch.float32).to(values.dtype)
    for a, b in ((values[:, None], ones[None, :1]), (ones[:, None], values[None, :])):
        c = np.zeros((a.shape[0], b.shape[1]), np.float32)
        _run(library, (name, name), a, b, c, at=transposed, bt=transposed)
        expected = (a.float() * b.float()).numpy() + np.float32(0)
        rt.same(c.reshape(-1), expected.reshape(-1))
