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
