"""Whole kernels, as tutorials and users write them, natively against torch."""

import pytest
import torch
import triton
import triton.language as tl

from vllm_triton.compile.triton_cpu.errors import SettingError
from vllm_triton.compile.triton_cpu.ir import UnsupportedOperationError


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@pytest.mark.parametrize("n, block", [(1, 8), (15, 4), (1000, 64), (4097, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.int8])
def test_vector_add(n, block, dtype):
    x, y = (torch.randint(-50, 50, (n,)).to(dtype) for _ in range(2))
    out = torch.full((n + 8,), 77).to(dtype)
    _add[(triton.cdiv(n, block),)](x, y, out, n, block)
    assert torch.equal(out[:n], x + y) and bool((out[n:] == 77).all())


@triton.jit
def _softmax(x_ptr, out_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + columns, mask=columns < n, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * stride + columns, numerator / tl.sum(numerator, axis=0), mask=columns < n)


@pytest.mark.parametrize("rows, columns", [(3, 1), (5, 37), (2, 781), (1, 1024)])
def test_softmax(rows, columns):
    x = torch.randn(rows, columns)
    x[0, 0] = 30.0
    out = torch.empty_like(x)
    _softmax[(rows,)](x, out, columns, columns, triton.next_power_of_2(columns))
    torch.testing.assert_close(out, x.softmax(-1))
    x[-1, -1] = float("nan")
    _softmax[(rows,)](x, out, columns, columns, triton.next_power_of_2(columns))
    assert out[-1].isnan().all() and (rows == 1 or not out[:-1].isnan().any())


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Pointers that advance through the loop, as the tutorial has them."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a_ptrs = a_ptr + rows[:, None] * K + depth[None, :]
    b_ptrs = b_ptr + depth[:, None] * N + columns[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(tl.cdiv(K, BK)):
        left = K - start * BK
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (depth[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(depth[:, None] < left) & (columns[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BK
        b_ptrs += BK * N
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=(rows[:, None] < M) & (columns[None, :] < N))


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (16, 16, 16), (37, 300, 65), (64, 33, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul(m, n, k, dtype):
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    c = torch.empty(m, n)
    _matmul[(triton.cdiv(m, 16), triton.cdiv(n, 32))](a, b, c, m, n, k, 16, 32, 16)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-4)


@triton.jit
def _dropout(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    keep = tl.rand(seed, offsets) > p
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


def test_dropout_draws_philox():
    from vllm_triton.ops.sample_tokens.philox import uniform

    n, p, seed = 1000, 0.3, 123
    x, out = torch.randn(n), torch.empty(n)
    _dropout[(triton.cdiv(n, 128),)](x, out, n, p, seed, 128)
    keep = uniform(torch.full((n,), seed), torch.arange(n)) > p
    torch.testing.assert_close(out, torch.where(keep, x / (1 - p), 0.0))


@triton.jit
def _layer_norm(x_ptr, weight_ptr, bias_ptr, out_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * n + columns, mask=columns < n, other=0.0)
    mean = tl.sum(total, axis=0) / n
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=0.0)
        x = tl.where(columns < n, x - mean, 0.0)
        squares += x * x
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < n
        x = (tl.load(x_ptr + row * n + columns, mask=mask, other=0.0) - mean) * scale
        y = x * tl.load(weight_ptr + columns, mask=mask) + tl.load(bias_ptr + columns, mask=mask)
        tl.store(out_ptr + row * n + columns, y, mask=mask)


@pytest.mark.parametrize("n, block", [(5, 8), (77, 32), (512, 128)])
def test_layer_norm(n, block):
    x, weight, bias = torch.randn(4, n) * 3 + 1, torch.randn(n), torch.randn(n)
    out = torch.empty_like(x)
    _layer_norm[(4,)](x, weight, bias, out, n, 1e-5, block)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (n,), weight, bias, 1e-5), rtol=1e-4, atol=1e-5)


@triton.jit
def _flash(q_ptr, k_ptr, v_ptr, out_ptr, n, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1) * n * D
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    highest = tl.full([BM], -float("inf"), dtype=tl.float32)
    mass = tl.zeros([BM], dtype=tl.float32)
    total = tl.zeros([BM, D], dtype=tl.float32)
    for start in range(0, n, BN):
        columns = start + tl.arange(0, BN)
        k = tl.load(k_ptr + head + columns[None, :] * D + d[:, None], mask=columns[None, :] < n, other=0.0)
        v = tl.load(v_ptr + head + columns[:, None] * D + d[None, :], mask=columns[:, None] < n, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        seen = (rows[:, None] >= columns[None, :]) & (columns[None, :] < n)
        scores = tl.where(seen, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        mass = mass * rescale + tl.sum(weights, axis=1)
        total = total * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
        highest = new_highest
    tl.store(out_ptr + head + rows[:, None] * D + d[None, :], total / mass[:, None], mask=rows[:, None] < n)


@pytest.mark.parametrize("n", [1, 16, 45, 128])
def test_flash_attention(n):
    q, k, v = (torch.randn(2, n, 32) for _ in range(3))
    out = torch.empty_like(q)
    _flash[(triton.cdiv(n, 16), 2)](q, k, v, out, n, 32**-0.5, 32, 16, 32)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@triton.jit
def _transpose_in_place(x_ptr, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + rows * N + columns)
    tl.store(x_ptr + columns * N + rows, x)


@triton.jit
def _reverse_in_place(x_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(x_ptr + N - 1 - offsets, tl.load(x_ptr + offsets))


@pytest.mark.parametrize("n", [2, 8, 32])
def test_all_of_a_tile_is_read_before_it_is_written(n):
    x = torch.randn(n, n)
    expected = x.T.clone()
    _transpose_in_place[(1,)](x, n)
    assert torch.equal(x, expected)
    y = torch.randn(n * 16)
    expected = y.flip(0)
    _reverse_in_place[(1,)](y, n * 16)
    assert torch.equal(y, expected)


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
def _multiply_and_add(left_a, left_b, right_a, right_b):
    return left_a * right_a, left_b * right_a + right_b


@triton.jit
def _scans(x_ptr, sum_ptr, reverse_ptr, linear_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + rows * N + columns)
    tl.store(sum_ptr + rows * N + columns, tl.cumsum(x, axis=1))
    tl.store(reverse_ptr + rows * N + columns, tl.cumsum(x, axis=0, reverse=True))
    half = tl.full([M, N], 0.5, dtype=tl.float32)
    _, state = tl.associative_scan((half, x), 1, _multiply_and_add)
    tl.store(linear_ptr + rows * N + columns, state)


@pytest.mark.parametrize("m, n", [(1, 2), (4, 8), (2, 64)])
def test_scans(m, n):
    x = torch.randn(m, n)
    sums, backwards, linear = (torch.empty(m, n) for _ in range(3))
    _scans[(1,)](x, sums, backwards, linear, m, n)
    torch.testing.assert_close(sums, x.cumsum(1))
    torch.testing.assert_close(backwards, x.flip(0).cumsum(0).flip(0))
    state, expected = torch.zeros(m), []
    for column in x.T:
        state = 0.5 * state + column
        expected.append(state)
    torch.testing.assert_close(linear, torch.stack(expected, 1))


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
def _adds_atomically(x_ptr):
    tl.atomic_add(x_ptr, 1)


def test_what_is_not_covered_is_named_with_its_line():
    with pytest.raises(UnsupportedOperationError, match=r"test_kernels\.py:\d+: tt\.atomic_rmw"):
        _adds_atomically[(1,)](torch.zeros(1, dtype=torch.int32))


def test_bounds_checks_are_refused_rather_than_left_out(monkeypatch):
    monkeypatch.setenv("VLLM_TRITON_CPU_CHECK", "1")
    x = torch.ones(8)
    with pytest.raises(SettingError, match="VLLM_TRITON_CPU_CHECK"):
        _add[(1,)](x, x, x, 8, 8)


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
