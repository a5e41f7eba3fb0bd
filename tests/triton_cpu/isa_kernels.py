"""Kernels whose code differs most between instruction sets. As a program: runs them and saves what they give.

python isa_kernels.py PATH, with VLLM_TRITON_CPU_ISA set
"""

import sys

import torch
import triton
import triton.language as tl

NAN, INF = float("nan"), float("inf")


@triton.jit
def _elementwise(x_ptr, y_ptr, out_ptr, chosen_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=7)
    y = tl.load(y_ptr + offsets, mask=(offsets >= 3) & (offsets < n - 2), other=-1)
    tl.store(out_ptr + offsets, x * y - x, mask=offsets < n)
    tl.store(chosen_ptr + 2 * offsets, tl.where(x > y, tl.maximum(x, y), tl.abs(x)), mask=offsets % 3 != 1)


@triton.jit
def _exponential(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.exp(tl.load(x_ptr + offsets)))


@triton.jit
def _reduce(x_ptr, rows_ptr, columns_ptr, best_ptr, scan_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    places = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + places)
    tl.store(rows_ptr + rows, tl.sum(x, axis=1))
    tl.store(columns_ptr + columns, tl.max(x, axis=0))
    tl.store(best_ptr + rows, tl.argmin(x, axis=1))
    tl.store(scan_ptr + places, tl.cumsum(x, axis=1, reverse=True))


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, out_ptr, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * k + depth[None, :], mask=(rows[:, None] < m) & (depth[None, :] < k), other=0)
    b = tl.load(
        b_ptr + columns[None, :] * k + depth[:, None], mask=(columns[None, :] < n) & (depth[:, None] < k), other=0
    )
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    c = tl.load(c_ptr + rows[:, None] * n + columns[None, :], mask=mask, other=0)
    total = tl.dot(a, b, c, input_precision="ieee", out_dtype=c.dtype)
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], total, mask=mask)


@triton.jit
def _computed_dot(a_ptr, b_ptr, out_ptr, m, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + depth, mask=(rows[:, None] < m) & (depth < k), other=0)
    b = tl.load(b_ptr + depth[:, None] * N + columns, mask=depth[:, None] < k, other=0)
    b = (b.to(tl.float32) * 1.5 - 2).to(a.dtype)
    tl.store(out_ptr + rows[:, None] * N + columns, tl.dot(a, b, input_precision="ieee"))


@triton.jit
def _gather(x_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + offsets)
    tl.store(out_ptr + (BLOCK - 1 - index), tl.load(x_ptr + 3 * index, mask=index < n, other=-9), mask=index != 5)


@triton.jit
def _float8(x_ptr, narrow_ptr, wide_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    narrow = tl.load(x_ptr + offsets).to(narrow_ptr.dtype.element_ty)
    tl.store(narrow_ptr + offsets, narrow)
    tl.store(wide_ptr + offsets, narrow.to(tl.float32))


def whole_numbers(*shape, dtype):
    return torch.randint(-4, 5, shape).to(dtype)


def run_all() -> dict[str, list[torch.Tensor]]:
    """Results by the kernel's name and type. All but the exponential are exact, so that no order of sums shows."""
    torch.manual_seed(0)
    results = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64):
        x, y = whole_numbers(1000, dtype=dtype), whole_numbers(1000, dtype=dtype)
        if dtype.is_floating_point:
            x[::37], x[5::41], y[7::29] = NAN, INF, -INF
        out, chosen = torch.full((1000,), 99, dtype=dtype), torch.full((2048,), 99, dtype=dtype)
        _elementwise[(16,)](x, y, out, chosen, 997, BLOCK=64)
        results[f"elementwise {dtype}"] = [out, chosen]
    for dtype in (torch.float32, torch.int32, torch.int64):
        x = whole_numbers(8, 64, dtype=dtype)
        if dtype == torch.float32:
            x[2, 9], x[3, 1], x[3, 60] = INF, -INF, INF
        results[f"reduce {dtype}"] = outs = [
            torch.empty(8, dtype=dtype),
            torch.empty(64, dtype=dtype),
            torch.empty(8, dtype=torch.int32),
            torch.empty(8, 64, dtype=dtype),
        ]
        _reduce[(1,)](x, *outs, 8, 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
        for m, n, k in ((1, 33, 64), (13, 7, 50), (30, 50, 45)):
            total = torch.float32 if dtype.is_floating_point else torch.int32
            a, b = whole_numbers(m, k, dtype=dtype), whole_numbers(n, k, dtype=dtype)
            c, out = whole_numbers(m, n, dtype=total), torch.empty(m, n, dtype=total)
            if dtype.is_floating_point:
                a[m // 2, k // 3], b[n // 2, k - 1], b[0, 0] = INF, NAN, -INF
            sizes = [max(16, triton.next_power_of_2(size)) for size in (m, n, k)]
            _dot[(1,)](a, b, c, out, m, n, k, 1 if m == 1 else sizes[0], *sizes[1:])
            results[f"dot {dtype} {m}x{n}x{k}"] = [out]
            assert torch.equal(out.double().nan_to_num(3), (a.double() @ b.double().T + c).nan_to_num(3)), dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for m, k in ((1, 2), (3, 64), (13, 500)):
            a, b, out = whole_numbers(16, 512, dtype=dtype), whole_numbers(512, 64, dtype=dtype), torch.empty(16, 64)
            a[0, 0], b[k - 1, 40], b[k // 2, 33] = INF, NAN, INF
            sizes = {"M": 1 if m == 1 else 16, "N": 64, "K": max(2, triton.next_power_of_2(k))}
            a, out = a[:, : sizes["K"]].contiguous(), out[: sizes["M"]]
            _computed_dot[(1,)](a, b, out, m, k, **sizes)
            results[f"computed dot {dtype} {m}x{k}"] = [out]
            left, right = (torch.zeros(size) for size in (a[: sizes["M"]].shape, (sizes["K"], 64)))
            left[:m, :k], right[:k] = a[:m, :k], b[:k]
            torch.testing.assert_close(out, left @ (right * 1.5 - 2), rtol=0, atol=0, equal_nan=True)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int64):
        x, out = whole_numbers(200, dtype=dtype), torch.full((64,), 77, dtype=dtype)
        _gather[(1,)](x, torch.randperm(64), out, 60, 64)
        results[f"gather {dtype}"] = [out]
    x = torch.cat([torch.tensor([NAN, INF, -INF, 0.0, -0.0, 448, 465, 57344, 61440]), torch.randn(1015) * 2**8])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        narrow, wide = torch.empty(1024, dtype=dtype), torch.empty(1024)
        _float8[(1,)](x, narrow, wide, 1024)
        results[f"float8 {dtype}"] = [narrow.view(torch.uint8), wide]
    x, out = torch.linspace(-110, 95, 1024), torch.empty(1024)
    _exponential[(1,)](x, out, 1024)
    results["exponential"] = [out]
    return results


if __name__ == "__main__":
    torch.save(run_all(), sys.argv[1])
