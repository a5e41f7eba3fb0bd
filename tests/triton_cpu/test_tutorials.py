"""Tutorial kernels in three precisions, at odd sizes, with NaN and infinity, natively against torch in float64."""

import pytest
import torch
import triton
import triton.language as tl
import tutorial_kernels as kernels

from vllm_triton.ops.testing.tolerance import assert_within_rounding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def poisoned(*shape, dtype):
    """A place for results that shows what was not written."""
    return torch.full(shape, NAN, dtype=dtype)


def check(actual, function, *inputs, factor=3.0):
    """`function` in float64 is the truth, and in the inputs' own precision the measure of unavoidable rounding."""
    assert_within_rounding(actual, function(*(x.double() for x in inputs)), function(*inputs), factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 17, 1023, 98432])
def test_add(dtype, n):
    torch.manual_seed(n)
    x, y = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    x[n // 2], y[n // 3] = INF, -INF
    out = poisoned(n + 5, dtype=dtype)
    kernels.add[(triton.cdiv(n, 256),)](x, y, out, n, BLOCK=256)
    assert torch.equal(out[:n].nan_to_num(9), (x + y).nan_to_num(9)) and out[n:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns, programs", [(1, 1, 1), (5, 7, 2), (9, 781, 4), (3, 1024, 5)])
def test_softmax(dtype, rows, columns, programs):
    torch.manual_seed(rows)
    x = (torch.randn(rows, columns + 3) * 4).to(dtype)[:, :columns]
    x[0, -1] = -INF
    if rows > 4:
        x[1, 0], x[2, columns // 2] = INF, NAN
        x[3] = -INF
    out = poisoned(rows, columns, dtype=dtype)
    block = triton.next_power_of_2(columns)
    kernels.softmax[(programs,)](x, out, x.stride(0), out.stride(0), rows, columns, block)
    if columns == 1:
        assert out.isnan().all()  # exp(-inf + inf)
        return
    for row in range(rows):  # each by the band of its own values
        check(out[row], lambda x: x.softmax(0), x[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (64, 64, 64), (75, 131, 43), (130, 47, 96)])
@pytest.mark.parametrize("transposed", [False, True])
def test_autotuned_matmul_in_groups(dtype, m, n, k, transposed):
    torch.manual_seed(m)
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    if transposed:
        a, b = a.T.contiguous().T, b.T.contiguous().T
    c = poisoned(m, n, dtype=dtype)
    activation = "leaky_relu" if transposed else ""

    def grid(meta):
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)

    kernels.matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), ACTIVATION=activation)
    assert kernels.matmul.best_config in kernels.matmul.configs
    check(c, lambda a, b: torch.nn.functional.leaky_relu(a @ b, 0.01) if transposed else a @ b, a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_spread_along_a_product_as_ieee_says(dtype):
    """Masked-out depth counts as 0 times 0, whatever lies behind the matrices' ends."""
    m, n, k = 37, 41, 45
    a_all, b_all = torch.full((m, 64), NAN, dtype=dtype), torch.full((64, n), INF, dtype=dtype)
    a, b = a_all[:, :k], b_all[:k]
    a.copy_(torch.randn(m, k))
    b.copy_(torch.randn(k, n))
    a[0, 0], a[3, 44], a[5, 7], b[7, 11], b[20, 40] = INF, NAN, 0.0, INF, -INF
    c = poisoned(m, n, dtype=torch.float32)
    grid = lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)
    kernels.matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), ACTIVATION="")
    exact = a.double() @ b.double()
    assert exact.isnan().sum() > 40 and exact.isinf().sum() > 100
    assert_within_rounding(c, exact, a.float() @ b.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_draws_the_same_again(dtype):
    from vllm_triton.ops.sample_tokens.philox import uniform

    n, p, seed = 1003, 0.4, 2**31 - 5
    x, out = torch.randn(n).to(dtype), poisoned(n, dtype=dtype)
    kernels.dropout[(triton.cdiv(n, 128),)](x, out, n, p, seed, BLOCK=128)
    kept = uniform(torch.full((n,), seed), torch.arange(n)) > p
    assert 0.5 < kept.float().mean() < 0.7
    check(out, lambda x: torch.where(kept, x / (1 - p), 0.0), x)
    again = poisoned(n, dtype=dtype)
    kernels.dropout[(triton.cdiv(n, 64),)](x, again, n, p, seed, BLOCK=64)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns, block", [(1, 1, 1), (7, 33, 16), (5, 300, 512), (19, 128, 128)])
def test_layer_norm_forward_and_backward(dtype, rows, columns, block):
    torch.manual_seed(columns)
    x, dy = (torch.randn(rows, columns) * 2 + 0.3).to(dtype), torch.randn(rows, columns).to(dtype)
    weight, bias = torch.rand(columns).to(dtype), torch.rand(columns).to(dtype)
    out, dx = poisoned(rows, columns, dtype=dtype), poisoned(rows, columns, dtype=dtype)
    mean, scale = poisoned(rows, dtype=torch.float32), poisoned(rows, dtype=torch.float32)
    kernels.layer_norm[(rows,)](x, weight, bias, out, mean, scale, columns, columns, 1e-3, block)

    def forward(x, weight, bias):
        return torch.nn.functional.layer_norm(x, (columns,), weight, bias, 1e-3)

    check(out, forward, x, weight, bias)
    programs = 3
    partial = [poisoned(programs, columns, dtype=torch.float32) for _ in range(2)]
    sums = [poisoned(columns, dtype=dtype) for _ in range(2)]
    kernels.layer_norm_backward[(programs,)](
        dx, dy, *partial, x, weight, mean, scale, columns, rows, columns, triton.next_power_of_2(columns)
    )
    for part, total in zip(partial, sums, strict=True):
        kernels.sum_rows[(triton.cdiv(columns, 32),)](part, total, programs, columns, BM=2, BN=32)

    def backward(*inputs):
        *inputs, dy = inputs
        inputs = [value.detach().requires_grad_() for value in inputs]
        return torch.autograd.grad(forward(*inputs), inputs, dy)

    for number, actual in enumerate((dx, *sums)):
        check(actual, lambda *inputs, number=number: backward(*inputs)[number], x, weight, bias, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length, d, bm, bn", [(1, 16, 16, 16), (50, 64, 32, 16), (128, 32, 64, 64), (97, 16, 64, 32)])
def test_attention(dtype, causal, length, d, bm, bn):
    torch.manual_seed(length)
    q, k, v = (torch.randn(3, length, d).to(dtype) for _ in range(3))
    out = poisoned(3, length, d, dtype=dtype)
    kernels.attention[(triton.cdiv(length, bm), 3)](q, k, v, out, length, d**-0.5, d, bm, bn, causal)

    def reference(q, k, v):
        scores = q @ k.transpose(1, 2) * d**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -INF)
        return scores.softmax(-1) @ v

    check(out, reference, q, k, v)


@triton.jit
def _permute_in_place(x_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr):
    places = x_ptr + tl.arange(0, A * B * C)
    x = tl.reshape(tl.load(places), (A, B, C))
    tl.store(places, tl.reshape(tl.permute(x, ORDER), (A * B * C,)))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (2, 4, 8)),
        (torch.float16, (1, 16, 2)),
        (torch.bfloat16, (4, 1, 32)),
        (torch.int8, (2, 32, 16)),
        (torch.int64, (16, 2, 2)),
    ],
)
@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_tile_permuted_in_place(dtype, shape, order):
    x = torch.randint(-99, 99, shape).to(dtype)
    expected = x.permute(order).flatten()
    _permute_in_place[(1,)](x, *shape, order)
    assert torch.equal(x.flatten(), expected)


@triton.jit
def _turn_and_add(x_ptr, turns, N: tl.constexpr):
    """A carried tile and the memory that it came from change places in every turn."""
    places = x_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(places)
    for turn in range(turns):
        x = tl.trans(x) + turn
        tl.store(places, x + tl.trans(tl.load(places)))
        x = x - tl.load(places)


@pytest.mark.parametrize("n", [2, 4, 16, 32])
@pytest.mark.parametrize("turns", [0, 1, 4])
def test_carried_tile_permuted_and_stored_over_itself(n, turns):
    x = torch.randint(-9, 9, (n, n)).int()
    carried, memory = x.clone(), x.clone()
    for turn in range(turns):
        carried = carried.T + turn
        memory = carried + memory.T
        carried = carried - memory
    _turn_and_add[(1,)](x, turns, n)
    assert torch.equal(x, memory)


@triton.jit
def _softmax_in_place(x_ptr, M: tl.constexpr, N: tl.constexpr):
    places = x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(places)
    x = tl.exp(x - tl.max(x, 1)[:, None])
    x = x / tl.sum(x, 1)[:, None]
    reversed_rows = x_ptr + (M - 1 - tl.arange(0, M))[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(reversed_rows, x)


@pytest.mark.parametrize("shape", [(4, 4), (2, 64), (32, 16), (8, 2)])
def test_tile_normalised_and_reversed_in_place(shape):
    x = torch.randn(shape) * 5
    expected = x.double().softmax(1).flip(0)
    eager = x.softmax(1).flip(0)
    _softmax_in_place[(1,)](x, *shape)
    assert_within_rounding(x, expected, eager)
