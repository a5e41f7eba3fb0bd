"""Whole kernels, as tutorials and users write them, natively against torch."""

import pytest
import torch
import triton
import triton.language as tl


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
