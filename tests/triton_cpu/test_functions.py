"""Functions that are called, not inlined."""

import pytest
import torch
import triton
import triton.language as tl

from vllm_triton.compile.triton_cpu.ir import UnsupportedOperationError


@triton.jit(noinline=True)
def _pair(x, flag, scale):
    if flag:
        return x * scale, tl.program_id(0)
    return -x, -1


@triton.jit(noinline=True)
def _row(p, factor, N: tl.constexpr):
    first, _ = _pair(factor, True, 2)
    offsets = tl.arange(0, N)
    return tl.load(p + offsets) * first, first


@triton.jit(noinline=True)
def _fill(p, value):
    tl.store(p, value)


@triton.jit(noinline=True)
def _second_row(p, n):
    return p + n


@triton.jit
def _calls(x_ptr, out_ptr, pairs_ptr, N: tl.constexpr):
    program = tl.program_id(0)
    row, doubled = _row(x_ptr, program + 0.5, N)
    tl.store(out_ptr + program * N + tl.arange(0, N), row + doubled)
    yes, who = _pair(program, program % 2 == 1, 10)
    _fill(pairs_ptr + program * 3, yes)
    _fill(pairs_ptr + program * 3 + 1, who)
    _fill(_second_row(pairs_ptr, program * 3 + 2), tl.num_programs(0))


@pytest.mark.parametrize("n", [4, 32])
def test_results_nesting_and_program_ids(n):
    x, out, pairs = torch.randn(n), torch.empty(4, n), torch.empty(4, 3, dtype=torch.int32)
    _calls[(4,)](x, out, pairs, n)
    factors = 2 * (torch.arange(4) + 0.5)
    torch.testing.assert_close(out, x * factors[:, None] + factors[:, None])
    assert pairs.tolist() == [[0, -1, 4], [10, 1, 4], [-2, -1, 4], [30, 3, 4]]


@triton.jit(noinline=True)
def _early(x, n):
    if x > n:
        return -1
    if x == n:
        return 0
    while x * x < n:
        x += 1
    return x


@triton.jit
def _finds(out_ptr, start, n):
    tl.store(out_ptr, _early(start, n))
    tl.assume(n > 0)
    tl.debug_barrier()


@pytest.mark.parametrize("start, n, expected", [(2, 20, 5), (20, 20, 0), (21, 20, -1)])
def test_early_returns(start, n, expected):
    out = torch.zeros(1, dtype=torch.int32)
    _finds[(1,)](out, start, n)
    assert out.item() == expected


@triton.jit
def _scaled(a_ptr, scale_ptr, out_ptr):
    rows, columns = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    a = tl.load(a_ptr + rows * 32 + columns)
    scale = tl.load(scale_ptr + tl.arange(0, 32)[:, None])
    total = tl.dot_scaled(a.to(tl.float8e5), scale, "e5m2", a.to(tl.float8e5), scale, "e5m2")
    tl.store(out_ptr + rows * 32 + columns, total)


def test_what_is_not_covered_is_named_with_its_line():
    with pytest.raises(UnsupportedOperationError, match=r"test_functions\.py:\d+: tt\.dot_scaled"):
        _scaled[(1,)](torch.zeros(32, 32), torch.zeros(32, dtype=torch.uint8), torch.zeros(32, 32))
