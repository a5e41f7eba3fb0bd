"""Conversions, loads and stores of the runtime against torch and numpy, for every instruction set."""

import ctypes
import mmap

import numpy as np
import pytest
import runtime_library as rt
import torch

SMALL = {
    "bf16": (torch.bfloat16, np.uint16),
    "f16": (torch.float16, np.uint16),
    "f8e4m3": (torch.float8_e4m3fn, np.uint8),
    "f8e5m2": (torch.float8_e5m2, np.uint8),
}
NATIVE = {
    "int8_t": np.int8,
    "uint8_t": np.uint8,
    "int16_t": np.int16,
    "uint16_t": np.uint16,
    "int32_t": np.int32,
    "uint32_t": np.uint32,
    "int64_t": np.int64,
    "uint64_t": np.uint64,
    "float": np.float32,
    "double": np.float64,
}


def _memory(storage: str) -> str:
    """Functions over 16 elements at `p`, which need not be aligned."""
    return f"""
extern "C" void load_masked_{storage}(const {storage}* p, int64_t bits, const reg_t<{storage}>* other,
                                      reg_t<{storage}>* out) {{
  store(out, load_masked(p, bits, load(other)));
}}
extern "C" void store_masked_{storage}({storage}* p, int64_t bits, const reg_t<{storage}>* x) {{
  store_masked(p, bits, load(x));
}}
extern "C" void gather_{storage}(const {storage}* p, const int64_t* index, int64_t bits, const reg_t<{storage}>* other,
                                 reg_t<{storage}>* out) {{
  store(out, gather(p, load(index), bits, load(other)));
}}
extern "C" void scatter_{storage}({storage}* p, const int64_t* index, int64_t bits, const reg_t<{storage}>* x) {{
  scatter(p, load(index), bits, load(x));
}}
"""


def _source() -> str:
    text = ""
    for name in SMALL:
        text += rt.unary(f"widen_{name}", name, "x", "float") + rt.unary(f"narrow_{name}", "float", "x", name)
        text += rt.unary(f"narrow_double_{name}", "double", f"(tcpu::convert<double, {name}>(x))", name)
        text += rt.unary(f"narrow_int_{name}", "int32_t", f"(tcpu::convert<int32_t, {name}>(x))", name)
        text += rt.unary(f"round_{name}", "float", f"(tcpu::convert<float, {name}>(x))")
        text += (
            f'extern "C" void scalar_{name}(const float* in, {name}* out, float* back, int64_t n) {{'
            f" for (int64_t i = 0; i < n; ++i) {{ store_scalar(out + i, in[i]); back[i] = load_scalar(out + i); }} }}\n"
        )
    for a in NATIVE:
        for b in NATIVE:
            text += rt.unary(f"convert_{a}_{b}", a, f"(tcpu::convert<{a}, {b}>(x))", b)
    return text + "".join(_memory(storage) for storage in (*NATIVE, *SMALL))


@pytest.fixture(params=rt.LEVELS_BESIDE_DOT, scope="module")
def library(request):
    return rt.build(_source(), request.param)


def _bits(tensor: torch.Tensor, name: str) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().view(SMALL[name][1])


def _same_small(name: str, actual: np.ndarray, expected: torch.Tensor) -> None:
    """Equal bits, but for NaN."""
    values = torch.from_numpy(actual.view(np.uint8)).view(SMALL[name][0])
    nan = torch.isnan(expected.float()).numpy()
    np.testing.assert_array_equal(torch.isnan(values.float()).numpy(), nan)
    np.testing.assert_array_equal(actual[~nan], _bits(expected, name)[~nan])


@pytest.mark.parametrize("name", SMALL)
def test_every_encoding_widens_exactly_and_comes_back(library, name):
    dtype, unsigned = SMALL[name]
    codes = np.arange(2 ** (8 * unsigned().itemsize)).astype(unsigned)
    stored = torch.from_numpy(codes.view(np.uint8)).view(dtype)
    widened, back = np.empty(len(codes), np.float32), np.empty_like(codes)
    rt.function(library, f"widen_{name}")(codes, widened, len(codes))
    rt.same(widened, stored.float().numpy())
    rt.function(library, f"narrow_{name}")(widened, back, len(codes))
    _same_small(name, back, stored)


@pytest.mark.parametrize("name", SMALL)
def test_floats_round_as_in_torch(library, name):
    dtype, unsigned = SMALL[name]
    generator = np.random.default_rng(11)
    small = generator.normal(0, 1, 50000) * 2.0 ** generator.integers(-30, 17, 50000)
    # Every encoding's value and the ties between neighbours are where rounding goes wrong.
    codes = torch.arange(0, 2**15 if unsigned is np.uint16 else 2**7)
    values = codes.to(torch.int16 if unsigned is np.uint16 else torch.int8).view(dtype).double().numpy()
    values = values[np.isfinite(values)]
    ties = (values[1:] + values[:-1]) / 2
    x = np.concatenate([small, values, ties, np.nextafter(ties.astype(np.float32), np.float32(np.inf)), -ties])
    x = rt.padded(np.concatenate([rt.some_floats(12, 50000), x.astype(np.float32)]))
    expected = torch.from_numpy(x).to(dtype)
    result = np.empty(len(x), unsigned)
    rt.function(library, f"narrow_{name}")(x, result, len(x))
    _same_small(name, result, expected)
    rounded = np.empty_like(x)
    rt.function(library, f"round_{name}")(x, rounded, len(x))
    rt.same(rounded, expected.float().numpy())
    few = x[:3000].copy()
    result, back = np.empty(len(few), unsigned), np.empty_like(few)
    rt.function(library, f"scalar_{name}")(few, result, back, len(few))
    _same_small(name, result, expected[:3000])
    rt.same(back, expected[:3000].float().numpy())


@pytest.mark.parametrize("name", SMALL)
def test_doubles_and_integers_round_once(library, name):
    """A double just above a tie rounds up, though as a float it would be the tie itself."""
    dtype, unsigned = SMALL[name]
    values = torch.arange(1, 2**14 if unsigned is np.uint16 else 2**6)
    values = values.to(torch.int16 if unsigned is np.uint16 else torch.int8).view(dtype).double().numpy()
    values = values[np.isfinite(values)]
    lower, upper = values[:-1], values[1:]
    tie = (lower + upper) / 2
    for x, expected in ((tie * (1 + 2.0**-50), upper), (tie * (1 - 2.0**-50), lower)):
        for sign in (1, -1):
            given = rt.padded(sign * x)
            result = np.empty(len(given), unsigned)
            rt.function(library, f"narrow_double_{name}")(given, result, len(given))
            _same_small(name, result, torch.from_numpy(rt.padded(sign * expected)).to(dtype))
    integers = rt.padded(
        np.array([2**24 + 2**16 + 1, 0, 1, -1, 255, 256, 257, 65519, 65520, -(2**31), 2**31 - 1], np.int32)
    )
    result = np.empty(len(integers), unsigned)
    rt.function(library, f"narrow_int_{name}")(integers, result, len(integers))
    expected = torch.from_numpy(integers.astype(np.float64)).to(torch.float32).to(dtype)
    if name == "bf16":
        expected[0] = 2**24 + 2**17  # just above a tie, where float holds the tie itself
        expected = torch.where(torch.from_numpy(integers == integers[0]), expected[0], expected)
    _same_small(name, result, expected)


@pytest.mark.parametrize("a", NATIVE)
def test_native_types_convert_as_in_numpy(library, a):
    source = NATIVE[a]
    generator = np.random.default_rng(13)
    for b, target in NATIVE.items():
        if source in (np.float32, np.float64):
            limit = 2.0 ** min(8 * target().itemsize - 1, 62) if np.issubdtype(target, np.integer) else 1e6
            x = generator.uniform(0 if np.issubdtype(target, np.unsignedinteger) else -limit, limit * 0.999, 256)
            x = np.concatenate([x, [0.0, 0.5, 0.999, 1.5, 2.5, 100.99]]).astype(source)
        else:
            info = np.iinfo(source)
            x = generator.integers(info.min, info.max, 256, dtype=source, endpoint=True)
            x = np.concatenate([x, np.array([info.min, info.max, 0, 1], source)])
        x = rt.padded(x)
        result = np.empty(len(x), target)
        rt.function(library, f"convert_{a}_{b}")(x, result, len(x))
        rt.same(result, x.astype(target))


@pytest.mark.parametrize("b", [name for name in NATIVE if name not in ("float", "double")])
def test_floats_outside_an_integers_range_do_not_trap(library, b):
    for a, source in (("float", np.float32), ("double", np.float64)):
        x = rt.padded(np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 5.0], source))
        result = np.empty(len(x), NATIVE[b])
        rt.function(library, f"convert_{a}_{b}")(x, result, len(x))
        assert result[5] == 5


class _AtPageEnd:
    """`count` elements that end where readable memory ends."""

    def __init__(self, dtype: np.dtype, count: int):
        self.map = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        size = count * dtype.itemsize
        self.values = np.frombuffer(self.map, dtype, count, mmap.PAGESIZE - size)


@pytest.mark.parametrize("storage", [*NATIVE, *SMALL])
def test_masked_lanes_touch_no_memory(library, storage):
    dtype = np.dtype(SMALL[storage][1] if storage in SMALL else NATIVE[storage])
    register = np.dtype(np.float32) if storage in SMALL else dtype
    other = (np.arange(16) + 100).astype(register)
    for count in (1, 5, 8, 9, 15, 16):
        at_end = _AtPageEnd(dtype, count)
        at_end.values[:] = np.arange(count)
        plain = np.zeros(16, register)
        if storage in SMALL:
            codes = np.zeros(16, dtype)
            codes[:count] = at_end.values
            rt.function(library, f"widen_{storage}")(codes, plain, 16)
        else:
            plain[:count] = at_end.values
        everything = 2**count - 1
        for bits in (everything, everything & 0xFFB7):
            lanes = (bits >> np.arange(16)) & 1 == 1
            out = np.empty(16, register)
            rt.function(library, f"load_masked_{storage}")(at_end.values, bits, other, out)
            rt.same(out, np.where(lanes, plain, other))
            index = np.where(lanes, np.arange(16)[::-1] % count, 2**60)
            rt.function(library, f"gather_{storage}")(at_end.values, index, bits, other, out)
            rt.same(out, np.where(lanes, plain[index % 16], other))
            at_end.values[:] = 0
            rt.function(library, f"store_masked_{storage}")(at_end.values, bits, plain)
            np.testing.assert_array_equal(at_end.values, np.where(lanes[:count], np.arange(count), 0))
            at_end.values[:] = np.arange(count)


@pytest.mark.parametrize("storage", [*NATIVE, *SMALL])
def test_scatter_writes_lanes_in_order(library, storage):
    dtype = np.dtype(SMALL[storage][1] if storage in SMALL else NATIVE[storage])
    register = np.dtype(np.float32) if storage in SMALL else dtype
    x = np.arange(16).astype(register)
    memory = np.zeros(8, dtype)
    index = np.array([1, 1, 2, 7, 7, 7, 3, 2**60, 5, 0, 0, 4, 6, 6, 1, 2**60], np.int64)
    bits = 0x7FFF & ~(1 << 7)
    rt.function(library, f"scatter_{storage}")(memory, index, bits, x)
    expected = np.array([10, 14, 2, 5, 11, 8, 13, 5], np.float32)
    expected[3] = 6
    if storage in SMALL:
        encoded = torch.from_numpy(expected).to(SMALL[storage][0])
        _same_small(storage, memory, encoded)
    else:
        np.testing.assert_array_equal(memory, expected.astype(dtype))
