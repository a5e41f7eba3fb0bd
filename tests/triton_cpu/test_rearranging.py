"""gather, histogram, cat, map_elementwise, and scans over whole chunks of lanes."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _gather(x_ptr, index_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    AXIS: tl.constexpr = 0 if M != R else 1
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    places = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out_ptr + places, tl.gather(x + 1, tl.load(index_ptr + places), AXIS))


@pytest.mark.parametrize(
    "shape, taken", [((4, 8), (16, 8)), ((32, 16), (2, 16)), ((2, 4), (2, 64)), ((8, 64), (8, 16))]
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_gather(shape, taken, dtype, index_dtype):
    axis = 0 if shape[0] != taken[0] else 1
    x = torch.randint(-50, 50, shape).to(dtype)
    index = torch.randint(0, shape[axis], taken)
    out = torch.empty(taken, dtype=dtype)
    _gather[(1,)](x, index.to(index_dtype), out, *shape, *taken)
    assert torch.equal(out, (x + 1).gather(axis, index))


@triton.jit
def _gather_row(x_ptr, index_ptr, out_ptr, N: tl.constexpr, C: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, C), tl.gather(x, tl.load(index_ptr + tl.arange(0, C)), 0))


@pytest.mark.parametrize("n, c", [(1, 4), (8, 2), (64, 128)])
def test_gather_of_one_axis(n, c):
    x, index, out = torch.randn(n), torch.randint(0, n, (c,)), torch.empty(c)
    _gather_row[(1,)](x, index, out, n, c)
    assert torch.equal(out, x[index])


@triton.jit
def _histogram(x_ptr, out_ptr, n, N: tl.constexpr, BINS: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    counts = tl.histogram(x, BINS, mask=offsets < n) if MASKED else tl.histogram(x, BINS)
    tl.store(out_ptr + tl.arange(0, BINS), counts)


@pytest.mark.parametrize("n, size, bins", [(3, 4, 2), (64, 64, 16), (200, 256, 8)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_histogram(n, size, bins, masked, dtype):
    x = torch.randint(0, bins, (size,), dtype=dtype)
    out = torch.empty(bins, dtype=torch.int32)
    _histogram[(1,)](x, out, n, size, bins, masked)
    assert torch.equal(out.long(), torch.bincount(x[: n if masked else size].long(), minlength=bins))


@triton.jit
def _cat(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    both = tl.cat(tl.load(x_ptr + offsets) * 2, tl.load(y_ptr + offsets), can_reorder=True)
    tl.store(out_ptr + tl.arange(0, 2 * N), both)


@pytest.mark.parametrize("n", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_cat(n, dtype):
    x, y = (torch.randint(-9, 9, (n,)).to(dtype) for _ in range(2))
    out = torch.empty(2 * n, dtype=dtype)
    _cat[(1,)](x, y, out, n)
    assert torch.equal(out, torch.cat([x * 2, y]))


@triton.jit
def _ordered(left, right):
    if left > right:
        low, high = right, left
    else:
        low, high = left, right
    return low, high - low


@triton.jit
def _swapped(left, right):
    return right, left


@triton.jit
def _maps(x_ptr, y_ptr, low_ptr, span_ptr, swapped_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    low, span = tl.map_elementwise(_ordered, x, y)
    tl.store(low_ptr + offsets, low)
    tl.store(span_ptr + offsets, span)
    tl.store(swapped_ptr + offsets, tl.map_elementwise(_swapped, x, pack=2)[0])


@pytest.mark.parametrize("n", [2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_map_elementwise(n, dtype):
    x, y = (torch.randint(-50, 50, (n,)).to(dtype) for _ in range(2))
    low, span, swapped = (torch.empty(n, dtype=dtype) for _ in range(3))
    _maps[(1,)](x, y, low, span, swapped, n)
    assert torch.equal(low, torch.minimum(x, y)) and torch.equal(span, (x - y).abs())
    assert torch.equal(swapped, x.view(-1, 2).flip(1).reshape(n))


@triton.jit
def _affine(left_a, left_b, right_a, right_b):
    return left_a * right_a, left_b * right_a + right_b


@triton.jit
def _scan(x_ptr, sum_ptr, state_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    places = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + places)
    tl.store(sum_ptr + places, tl.cumsum(x, axis=AXIS, reverse=REVERSE))
    scale = (x.to(tl.int32) % 2).to(x.dtype)
    _, state = tl.associative_scan((scale, x), AXIS, _affine, reverse=REVERSE)
    tl.store(state_ptr + places, state)


@pytest.mark.parametrize("m, n", [(1, 16), (1, 64), (2, 32), (16, 16), (32, 4), (8, 128), (64, 1)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_scans(m, n, axis, reverse, dtype):
    """On small integers, which every type adds exactly; the second one is not commutative."""
    x = torch.randint(0, 4, (m, n)).to(dtype)
    sums, states = torch.empty_like(x), torch.empty_like(x)
    _scan[(1,)](x, sums, states, m, n, axis, reverse)
    along = x.flip(axis) if reverse else x
    expected, state = [], torch.zeros_like(along.select(axis, 0))
    for row in along.unbind(axis):
        state = state * (row.long() % 2) + row
        expected.append(state)
    expected_states = torch.stack(expected, axis)
    expected_sums = along.cumsum(axis).to(dtype)
    if reverse:
        expected_states, expected_sums = expected_states.flip(axis), expected_sums.flip(axis)
    assert torch.equal(sums, expected_sums) and torch.equal(states, expected_states)


@triton.jit
def _scan_row(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out_ptr + offsets, tl.cumsum(tl.load(x_ptr + offsets), 0))


@pytest.mark.parametrize("n", [4096])
def test_long_scan(n):
    x, out = torch.rand(n), torch.empty(n)
    _scan_row[(1,)](x, out, n)
    torch.testing.assert_close(out.double(), x.double().cumsum(0), rtol=1e-6, atol=0)
