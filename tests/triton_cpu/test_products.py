"""Products of tiles of every size, with rows that lie near each other and far apart."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _product(
    x_ptr, weight_ptr, out_ptr, m, n, k, stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr
):
    """x [m, k] times weight [n, k] or [k, n]; both have `stride` elements from row to row."""
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * stride + depth, mask=(rows[:, None] < m) & (depth < k), other=0)
    places = columns[None, :] * stride + depth[:, None] if TURNED else depth[:, None] * stride + columns[None, :]
    weight = tl.load(weight_ptr + places, mask=(columns[None, :] < n) & (depth[:, None] < k), other=0)
    total = tl.dot(x, weight, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * n + columns, total, mask=(rows[:, None] < m) & (columns < n))


SIZES = [(1, 16, 16), (2, 16, 1024), (4, 32, 512), (16, 16, 64), (64, 16, 512), (64, 32, 1024), (256, 128, 256)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("missing", [0, 1, 7])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_products_of_whole_numbers_are_exact(sizes, missing, turned, dtype):
    m, n, k = (max(size - missing, 1) for size in sizes)
    for stride in (1024 + 32, 2048):
        x, weight = torch.randint(-4, 5, (2, 1024, stride)).to(dtype)
        out = torch.zeros(m, n, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
        _product[(1,)](x, weight, out, m, n, k, stride, *sizes, turned)
        expected = x[:m, :k].float() @ (weight[:n, :k].float().T if turned else weight[:k, :n].float())
        assert torch.equal(out.float(), expected)


@triton.jit
def _computed(
    x_ptr, weight_ptr, bits_ptr, out_ptr, m, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WAY: tl.constexpr
):
    """x [m, K] times a weight [K, N] that is computed for the product alone. WAY: from what."""
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * K + depth, mask=rows[:, None] < m, other=0)
    if WAY == "rounded":
        weight = (tl.load(weight_ptr + depth[:, None] * N + columns) * 0.3).to(x.dtype)
    elif WAY == "exact":
        weight = tl.load(weight_ptr + depth[:, None] * N + columns).to(x.dtype) + 1
    elif WAY == "rows of one word":
        pairs = tl.load(bits_ptr + tl.arange(0, K // 2)[:, None] * N + columns)
        pairs = tl.trans(tl.join(pairs, pairs >> 16), (0, 2, 1))
        weight = tl.reshape(pairs.to(tl.int16).to(x.dtype, bitcast=True), [K, N])
    else:
        weight = tl.load(weight_ptr + tl.arange(0, K // 4)[:, None, None] * N + columns)
        weight = tl.reshape((weight * (1 + tl.arange(0, 4))[:, None]).to(x.dtype), [K, N])
    tl.store(out_ptr + rows[:, None] * N + columns, tl.dot(x, weight, input_precision="ieee"), mask=rows[:, None] < m)


def _computed_weight(way, weight, bits, dtype, depth):
    """What the kernel above multiplies by."""
    if way == "rounded":
        return (weight * 0.3).to(dtype)
    if way == "exact":
        return (weight.to(dtype).float() + 1).to(dtype)
    if way == "rows of one word":
        halves = bits.view(torch.int16).unflatten(1, (-1, 2)).transpose(1, 2)  # the lower half is the first row
        return halves.reshape(depth, -1).view(dtype)
    return (weight[: depth // 4, None] * torch.arange(1, 5)[:, None]).flatten(0, 1).to(dtype)


@pytest.mark.parametrize("way", ["rounded", "exact", "rows of one word", "rows from one"])
@pytest.mark.parametrize(
    "sizes", [(1, 32, 16), (4, 64, 4), (8, 32, 64), (16, 32, 512), (16, 128, 64), (8, 16, 32), (512, 64, 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_with_a_computed_weight(sizes, dtype, way):
    if dtype == torch.float32 and way == "rows of one word":
        pytest.skip("a word holds no two float32")
    (m, n, k), missing = sizes, sizes[0] > 4
    x = torch.randint(-4, 5, (m, k)).to(dtype)
    weight = torch.randint(-4, 5, (k, n)).float()
    bits = torch.randint(-4, 5, (k // 2, 2 * n)).to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    out = torch.zeros(m, n)
    _computed[(1,)](x, weight, bits.view(torch.int32), out, m - missing, m, n, k, way)
    expected = x.double() @ _computed_weight(way, weight, bits.view(torch.int32), dtype, k).double()
    expected[m - missing :] = 0
    torch.testing.assert_close(out.double(), expected, rtol=2**-18, atol=2**-18 * k)


@pytest.mark.parametrize("special", [float("inf"), float("nan"), 2.0**-127, 2.0**-126])
def test_a_computed_weight_may_hold_any_number(special):
    x, weight = torch.zeros(16, 16, dtype=torch.bfloat16), torch.ones(16, 64)
    x[:, 3], weight[3, 5] = 2, special
    out = torch.zeros(16, 64)
    _computed[(1,)](x, weight / 0.3, torch.zeros(1, dtype=torch.int32), out, 9, 16, 64, 16, "rounded")
    expected = x.float() @ (weight / 0.3 * 0.3).bfloat16().float()
    # Products of pairs take a subnormal number as zero.
    torch.testing.assert_close(out[:9], expected[:9], rtol=0, atol=2.0**-125, equal_nan=True)


@triton.jit
def _whole_tile(
    x_ptr, weight_ptr, out_ptr, m, n, k, stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr
):
    """As above, with all rows and columns of the result, of which those beyond m and n are products of zeros."""
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + rows[:, None] * stride + depth, mask=(rows[:, None] < m) & (depth < k), other=0)
    places = columns[None, :] * stride + depth[:, None] if TURNED else depth[:, None] * stride + columns[None, :]
    weight = tl.load(weight_ptr + places, mask=(columns[None, :] < n) & (depth[:, None] < k), other=0)
    ones = tl.full([M, N], 1, tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32)
    tl.store(out_ptr + rows[:, None] * N + columns, tl.dot(x, weight, ones, input_precision="ieee"))


NOT_FINITE = [None, (float("inf"), 0), (float("-inf"), 1), (float("nan"), 0), (float("nan"), 1)]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("existing", [(1, 128, 64), (5, 40, 64), (9, 1, 50), (64, 33, 64), (64, 128, 7)])
def test_what_meets_a_tile_s_missing_rows_is_multiplied_by_zero(existing, dtype, turned):
    (m, n, k), (M, N, K) = existing, (64, 128, 64)
    for special in NOT_FINITE[: 1 if dtype == torch.int8 else None]:
        x, weight = torch.randint(-4, 5, (2, 128, 160)).to(dtype)
        if special is not None:
            value, operand = special
            row, depth = min(2, (m, n)[operand] - 1), k - 1
            place = (row, depth) if operand == 0 or turned else (depth, row)
            (x, weight)[operand][place] = value
        left, right = torch.zeros(M, K), torch.zeros(K, N)
        left[:m, :k] = x[:m, :k]
        right[:k, :n] = weight[:n, :k].T if turned else weight[:k, :n]
        out = torch.empty(M, N, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
        _whole_tile[(1,)](x, weight, out, m, n, k, 160, M, N, K, turned)
        torch.testing.assert_close(out.float(), left @ right + 1, rtol=0, atol=0, equal_nan=True)
