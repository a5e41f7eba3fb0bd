"""Single operations and forms of control flow, natively against torch."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _reductions(x_ptr, row_sum_ptr, column_max_ptr, argmax_ptr, total_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    tl.store(row_sum_ptr + rows, tl.sum(x, axis=1))
    tl.store(column_max_ptr + columns, tl.max(x, axis=0))
    tl.store(argmax_ptr + rows, tl.argmax(x, axis=1))
    tl.store(total_ptr, tl.sum(x))


@pytest.mark.parametrize("m, n", [(1, 1), (2, 4), (4, 16), (16, 2), (8, 64), (64, 32)])
def test_reductions_along_every_axis(m, n):
    x = torch.randn(m, n)
    row_sum, column_max, argmax = torch.empty(m), torch.empty(n), torch.empty(m, dtype=torch.int32)
    total = torch.empty(1)
    _reductions[(1,)](x, row_sum, column_max, argmax, total, m, n)
    torch.testing.assert_close(row_sum, x.sum(1))
    assert torch.equal(column_max, x.amax(0)) and torch.equal(argmax.long(), x.argmax(1))
    torch.testing.assert_close(total[0], x.sum(), rtol=1e-4, atol=1e-5)


@triton.jit
def _control(x_ptr, out_ptr, n):
    """Collatz steps by a while, a branch whose results are tensors, and an early end."""
    program = tl.program_id(0)
    if program >= n:
        return
    value = tl.load(x_ptr + program)
    steps = 0
    while value > 1:
        if value % 2 == 0:  # noqa: SIM108  (a branch is what is tried here)
            value = value // 2
        else:
            value = 3 * value + 1
        steps += 1
    lanes = tl.arange(0, 4)
    result = tl.full([4], 0, dtype=tl.int32)
    if steps > 10:
        result += lanes * steps
    else:
        result -= lanes
    tl.store(out_ptr + program * 4 + lanes, result)


def test_control_flow():
    def collatz(value: int) -> int:
        steps = 0
        while value > 1:
            value, steps = (value // 2 if value % 2 == 0 else 3 * value + 1), steps + 1
        return steps

    x = torch.arange(1, 41, dtype=torch.int32)
    out = torch.full((50, 4), -99, dtype=torch.int32)
    _control[(50,)](x, out, 40)
    steps = [collatz(value) for value in x.tolist()]
    expected = [[lane * count if count > 10 else -lane for lane in range(4)] for count in steps]
    assert out[:40].tolist() == expected and bool((out[40:] == -99).all())


@triton.jit
def _shapes(x_ptr, out_ptr, N: tl.constexpr):
    """Interleaves, takes apart, transposes and reshapes; ends as x + 1 in another order."""
    x = tl.load(x_ptr + tl.arange(0, N))
    y = x + 1
    both = tl.interleave(x, y)
    pairs = tl.reshape(both, (N, 2))
    first, second = tl.split(pairs)
    square = tl.reshape(second, (N // 4, 4))
    turned = tl.trans(square)
    tl.store(out_ptr + tl.arange(0, N), tl.reshape(turned, (N,)) + first * 0)


@pytest.mark.parametrize("n", [4, 16, 128])
def test_shapes(n):
    x, out = torch.arange(n, dtype=torch.float32), torch.empty(n)
    _shapes[(1,)](x, out, n)
    assert torch.equal(out, (x + 1).view(n // 4, 4).T.reshape(n))


@triton.jit
def _sorts(x_ptr, sorted_ptr, flipped_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(sorted_ptr + offsets, tl.sort(x))
    tl.store(flipped_ptr + offsets, tl.flip(x, 0))


@pytest.mark.parametrize("n", [2, 16, 64])
def test_sort_and_flip(n):
    x = torch.randn(n)
    ordered, flipped = torch.empty(n), torch.empty(n)
    _sorts[(1,)](x, ordered, flipped, n)
    assert torch.equal(ordered, x.sort().values) and torch.equal(flipped, x.flip(0))


@triton.jit
def _integers(x_ptr, y_ptr, quotient_ptr, remainder_ptr, shifted_ptr, unsigned_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(quotient_ptr + offsets, x // y)
    tl.store(remainder_ptr + offsets, x % y)
    tl.store(shifted_ptr + offsets, (x >> 2) ^ (y << 1))
    tl.store(unsigned_ptr + offsets, (x.to(tl.uint32) > y.to(tl.uint32)).to(tl.int32))


def test_integers_divide_toward_zero():
    x, y = torch.randint(-100, 100, (64,)).int(), torch.randint(1, 9, (64,)).int()
    y[::2] *= -1
    outs = [torch.empty(64, dtype=torch.int32) for _ in range(4)]
    _integers[(1,)](x, y, *outs, 64)
    quotient = torch.div(x, y, rounding_mode="trunc")
    assert torch.equal(outs[0], quotient) and torch.equal(outs[1], x - quotient * y)
    assert torch.equal(outs[2], (x >> 2) ^ (y << 1))
    assert torch.equal(outs[3], ((x.long() % 2**32) > (y.long() % 2**32)).int())


@triton.jit
def _extremes(x_ptr, y_ptr, plain_ptr, propagating_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(plain_ptr + offsets, tl.maximum(x, y))
    tl.store(propagating_ptr + offsets, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))


def test_nan_in_maximum():
    nan = float("nan")
    x, y = torch.tensor([1.0, nan, 2.0, nan] * 4), torch.tensor([nan, 3.0, 1.0, nan] * 4)
    plain, propagating = torch.empty(16), torch.empty(16)
    _extremes[(1,)](x, y, plain, propagating, 16)
    assert torch.equal(plain.nan_to_num(-9), torch.fmax(x, y).nan_to_num(-9))
    assert torch.equal(propagating.nan_to_num(-9), torch.maximum(x, y).nan_to_num(-9))


@triton.jit
def _gather_rows(x_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr, D: tl.constexpr):
    rows = tl.load(index_ptr + tl.arange(0, BLOCK))
    columns = tl.arange(0, D)
    x = tl.load(x_ptr + rows[:, None] * D + columns[None, :])
    tl.store(out_ptr + tl.arange(0, BLOCK)[:, None] * D + columns[None, :], x)


@pytest.mark.parametrize("d", [1, 4, 32])
def test_indirect_loads(d):
    x, index = torch.randn(20, d), torch.randint(0, 20, (8,))
    out = torch.empty(8, d)
    _gather_rows[(1,)](x, index, out, 8, d)
    assert torch.equal(out, x[index])


@triton.jit
def _same_addend_in_every_turn(a_ptr, c_ptr, out_ptr, turns, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + rows * N + columns)
    c = tl.load(c_ptr + rows * N + columns)
    for turn in range(turns):
        tl.store(out_ptr + turn * N * N + rows * N + columns, tl.dot(a, a, c, input_precision="ieee"))


def test_a_product_in_a_loop_leaves_its_addend_alone():
    a, c, out = torch.randn(16, 16), torch.randn(16, 16), torch.empty(3, 16, 16)
    _same_addend_in_every_turn[(1,)](a, c, out, 3, 16)
    torch.testing.assert_close(out, (a @ a + c).expand(3, 16, 16), rtol=1e-4, atol=1e-4)


@triton.jit
def _reduced_in_a_branch(x_ptr, out_ptr, wanted, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N)) + 1
    total = 0.0
    if wanted > 0:
        total = tl.sum(x, axis=0)
    tl.store(out_ptr, total + tl.max(x, axis=0))


@pytest.mark.parametrize("n", [4, 32])
@pytest.mark.parametrize("wanted", [0, 1])
def test_a_branch_that_does_not_run_leaves_nothing_undone(n, wanted):
    x, out = torch.randn(n), torch.empty(1)
    _reduced_in_a_branch[(1,)](x, out, wanted, n)
    torch.testing.assert_close(out[0], (x + 1).sum() * wanted + (x + 1).max(), rtol=1e-4, atol=1e-5)


@triton.jit
def _scalar_beside_a_choice(x_ptr, sum_ptr, chosen_ptr):
    one, lanes = tl.arange(0, 1), tl.arange(0, 16)
    three = tl.full((1, 1), 3.0, tl.float32)
    for i in range(0, 31, 16):
        x = tl.load(x_ptr + i * 16 + lanes[:, None] + one[None, :], mask=lanes[:, None] < 48 - i * 32, other=0)
        total = three + tl.sum(tl.max(x, axis=0))
        chosen = tl.max(tl.where((i + one)[:, None] <= i - i * 16, total, 1.0))
        tl.store(chosen_ptr + i, chosen)
        tl.store(sum_ptr + i + one[:, None] + one[None, :], total)


def test_a_scalar_is_stored_as_it_is_beside_a_choice_that_takes_another():
    total, chosen = torch.zeros(17), torch.zeros(17)
    _scalar_beside_a_choice[(1,)](torch.full((512,), 5.0), total, chosen)
    assert total[::16].tolist() == [8, 3] and chosen[::16].tolist() == [8, 1]


@triton.jit
def _streamed(x_ptr, out_ptr, n, EARLY: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n, cache_modifier=".cs")
    if EARLY and tl.program_id(0) == 0:
        return
    tl.store(out_ptr + n + tl.program_id(0), tl.program_id(0).to(out_ptr.dtype.element_ty), cache_modifier=".cs")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("start", [0, 1, 16])
@pytest.mark.parametrize("early", [False, True])
def test_stores_past_the_caches(dtype, start, early):
    """From aligned and unaligned places, by whole and partial chunks, one element among them."""
    n, block, programs = 70, 32, 3
    x, buffer = torch.arange(n).to(dtype), torch.full((start + n + programs + 1,), -1, dtype=dtype)
    _streamed[(programs,)](x, buffer[start:], n, early, block)
    ends = torch.tensor([-1 if early else 0, 1, 2, -1]).to(dtype)
    assert torch.equal(buffer, torch.cat([torch.full((start,), -1, dtype=dtype), x, ends]))


@triton.jit
def _short_reductions(x_ptr, weight_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """Sums beside the lanes, of products by numbers that are the same for all lanes and of a type to convert."""
    a, b, c = tl.arange(0, A)[:, None, None, None], tl.arange(0, B)[None, :, None, None], tl.arange(0, C)
    lanes = tl.arange(0, N)
    x = tl.load(x_ptr + ((a * B + b) * C + c[None, None, :, None]) * N + lanes)
    for step in range(2):
        weight = tl.load(weight_ptr + step * B * C + tl.arange(0, B * C)).to(tl.float32)
        products = x * tl.reshape(weight, [1, B, C, 1])
        tl.store(
            out_ptr + step * A * N + tl.arange(0, A)[:, None] * N + lanes, tl.sum(tl.sum(products, axis=2), axis=1)
        )


@pytest.mark.parametrize("a, b, c, n", [(1, 4, 8, 16), (4, 4, 8, 16), (2, 8, 8, 32), (1, 1, 2, 16), (2, 2, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_short_reductions_beside_the_lanes(a, b, c, n, dtype):
    x, weight, out = torch.randn(a, b, c, n), torch.randint(-9, 9, (2, b, c)).to(dtype), torch.empty(2, a, n)
    _short_reductions[(1,)](x, weight, out, a, b, c, n)
    torch.testing.assert_close(out, torch.einsum("abcn,sbc->san", x, weight.float()), rtol=1e-5, atol=1e-4)


@triton.jit
def _read_twice(x_ptr, y_ptr, out_ptr, n, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=7)
    y = tl.load(y_ptr + offsets, mask=offsets < n, other=7)
    tl.store(out_ptr + offsets, tl.where(x > 0, 2 * x, -x) + y, mask=offsets < n)


@pytest.mark.parametrize("shift", [-300, -200, -64, -17, -1, 0, 1, 15, 64, 199, 200, 256, 300])
@pytest.mark.parametrize("n", [1, 64, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_a_tile_is_read_before_it_is_stored_over(shift, n, dtype):
    """x, y and the result overlap in one buffer, by any distance."""
    buffer = torch.randint(-99, 99, (1000,)).to(dtype)
    expected, start = buffer.clone(), 350
    x = buffer[start + shift :][:n]
    expected[start : start + n] = torch.where(x > 0, 2 * x, -x) + buffer[start - shift :][:n]
    _read_twice[(1,)](buffer[start + shift :][:n], buffer[start - shift :][:n], buffer[start:][:n], n, 256)
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("place", [0, 100, 256, 300])
def test_a_tile_is_read_before_wider_elements_are_stored_over_it(place):
    buffer = torch.randint(-99, 99, (400,)).float()
    x, y = buffer.view(torch.bfloat16)[place : place + 200], torch.randn(200).bfloat16()
    x.copy_(torch.randn(200))
    expected = buffer.clone()
    expected[100:300] = (torch.where(x > 0, 2 * x, -x) + y).float()
    _read_twice[(1,)](x, y, buffer[100:300], 200, 256)
    assert torch.equal(buffer, expected)


@triton.jit
def _add_transposed_in_place(x_ptr, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)
    x = tl.load(x_ptr + places)
    tl.store(x_ptr + places, x + tl.trans(x))


@pytest.mark.parametrize("n", [2, 16, 64])
def test_a_tile_is_read_in_two_orders_before_it_is_stored_over(n):
    x = torch.randn(n, n)
    expected = x + x.T
    _add_transposed_in_place[(1,)](x, n)
    assert torch.equal(x, expected)


@triton.jit
def _masked(x_ptr, out_ptr, n, N: tl.constexpr, LIMIT: tl.constexpr):
    """Masks that always hold, never hold, and hold by what is known only later."""
    offsets = 3 + 2 * tl.arange(0, N)
    x = tl.load(x_ptr + offsets, mask=(offsets < LIMIT) & (offsets >= 3) & (offsets <= n), other=-1.0)
    tl.store(out_ptr + tl.arange(0, N), x, mask=tl.arange(0, N)[None, :].reshape(N) < N)
    tl.store(out_ptr + N + tl.arange(0, N), x, mask=offsets < 3)
    tl.store(out_ptr + N + tl.arange(0, N), x, mask=offsets > 2 * N)


@pytest.mark.parametrize("n", [16, 128])
@pytest.mark.parametrize("limit", [0, 4, 5, "end - 1", "end", "end + 1"])
@pytest.mark.parametrize("length", [0, 60, 1000])
def test_masks_that_are_known_beforehand(n, limit, length):
    end = 3 + 2 * (n - 1) + 1
    limit = {"end - 1": end - 1, "end": end, "end + 1": end + 1}.get(limit, limit)
    offsets = 3 + 2 * torch.arange(n)
    x, out = torch.randn(end), torch.full((2 * n,), 5.0)
    _masked[(1,)](x, out, length, n, limit)
    read = torch.where((offsets < limit) & (offsets <= length), x[offsets], torch.tensor(-1.0))
    assert torch.equal(out, torch.cat([read, torch.where(offsets > 2 * n, read, torch.tensor(5.0))]))
