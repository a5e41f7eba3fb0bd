"""Atomic operations: every update and type, lanes and programs that meet at one address, masks, results."""

import pytest
import torch
import triton
import triton.language as tl

INTEGERS = [torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64]
BITWISE = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}


@triton.jit
def _update(p_ptr, x_ptr, old_ptr, n, KIND: tl.constexpr, UNSIGNED: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets)
    p = p_ptr + offsets
    if UNSIGNED:
        wide: tl.constexpr = tl.uint32 if x.dtype == tl.int32 else tl.uint64
        x = x.to(wide, bitcast=True)
        p = p.to(tl.pointer_type(wide))
    if KIND == "add":
        old = tl.atomic_add(p, x, mask=mask)
    elif KIND == "max":
        old = tl.atomic_max(p, x, mask=mask)
    elif KIND == "min":
        old = tl.atomic_min(p, x, mask=mask)
    elif KIND == "and":
        old = tl.atomic_and(p, x, mask=mask)
    elif KIND == "or":
        old = tl.atomic_or(p, x, mask=mask)
    elif KIND == "xor":
        old = tl.atomic_xor(p, x, mask=mask)
    else:
        old = tl.atomic_xchg(p, x, mask=mask)
    tl.store(old_ptr + offsets, old, mask=mask)


def _values(dtype: torch.dtype, size: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(size).to(dtype)
    return torch.randint(-(2**31), 2**31, (size,)).to(dtype)


def _check_update(kind, dtype, n, block, expected, unsigned=False):
    p, x = _values(dtype, block), _values(dtype, block)
    before, old = p.clone(), torch.full_like(p, 77)
    _update[(1,)](p, x, old, n, kind, unsigned, block)
    assert torch.equal(p[:n], expected(before, x)[:n]) and torch.equal(p[n:], before[n:])
    assert torch.equal(old[:n], before[:n]) and bool((old[n:] == 77).all())


@pytest.mark.parametrize("n, block", [(1, 1), (3, 4), (16, 16), (50, 64)])
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("kind", ["add", "max", "min", "xchg"])
def test_updates(kind, dtype, n, block):
    expected = {"add": torch.add, "max": torch.maximum, "min": torch.minimum, "xchg": lambda old, x: x}[kind]
    _check_update(kind, dtype, n, block, expected)


@pytest.mark.parametrize("n, block", [(3, 4), (50, 64)])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", BITWISE)
def test_bitwise_updates(kind, dtype, n, block):
    _check_update(kind, dtype, n, block, BITWISE[kind])


@pytest.mark.parametrize("n, block", [(3, 4), (50, 64)])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", ["max", "min"])
def test_unsigned_extremes(kind, dtype, n, block):
    def expected(old, x):
        lowest = torch.iinfo(dtype).min  # moves unsigned order onto signed order
        left, right = old ^ lowest, x ^ lowest
        return (torch.maximum if kind == "max" else torch.minimum)(left, right) ^ lowest

    _check_update(kind, dtype, n, block, expected, unsigned=True)


@pytest.mark.parametrize("n, block", [(3, 4), (50, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_add(dtype, n, block):
    _check_update("add", dtype, n, block, torch.add)


@triton.jit
def _add_to_few(p_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(p_ptr + offsets % BINS, 1, mask=offsets < n)
    tl.atomic_add(p_ptr + BINS, 2)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.float16])
@pytest.mark.parametrize("bins", [1, 3])
def test_lanes_and_programs_that_meet_all_count(bins, dtype):
    torch.set_num_threads(4)
    programs, block = 60, 32
    n = programs * block - 5
    p = torch.zeros(bins + 1, dtype=dtype)
    for _ in range(5):
        p.zero_()
        _add_to_few[(programs,)](p, n, bins, block)
        expected = [len(range(first, n, bins)) for first in range(bins)] + [2 * programs]
        assert p.tolist() == expected


@triton.jit
def _tickets(counter_ptr, seen_ptr):
    tl.store(seen_ptr + tl.atomic_add(counter_ptr, 1), tl.program_id(0))


def test_each_program_gets_a_number_of_its_own():
    torch.set_num_threads(4)
    counter, seen = torch.zeros(1, dtype=torch.int64), torch.full((2000,), -1, dtype=torch.int32)
    _tickets[(2000,)](counter, seen)
    assert counter.item() == 2000 and sorted(seen.tolist()) == list(range(2000))


@triton.jit
def _swap(p_ptr, expected_ptr, x_ptr, old_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    expected, x = tl.load(expected_ptr + offsets), tl.load(x_ptr + offsets)
    tl.store(old_ptr + offsets, tl.atomic_cas(p_ptr + offsets, expected, x))


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.float16, torch.bfloat16])
def test_compare_and_swap(dtype, block):
    p, x, old = (torch.arange(start, start + block).to(dtype) for start in (0, 200, 400))
    expected = p.clone()
    expected[::3] += 1
    before = p.clone()
    _swap[(1,)](p, expected, x, old, block)
    assert torch.equal(old, before) and torch.equal(p, torch.where(expected == before, x, before))


@triton.jit
def _locked(lock_ptr, data_ptr, turns):
    for _ in range(turns):
        while tl.atomic_cas(lock_ptr, 0, 1) == 1:
            pass
        tl.store(data_ptr, tl.load(data_ptr) + 1)
        tl.atomic_xchg(lock_ptr, 0)


def test_a_lock_protects_what_is_not_atomic():
    torch.set_num_threads(2)
    lock, data = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    _locked[(20,)](lock, data, 50)
    assert data.item() == 20 * 50 and lock.item() == 0


@triton.jit
def _scalar(p_ptr, old_ptr, wanted):
    old = tl.atomic_add(p_ptr, 3, mask=wanted > 0)
    if wanted > 0:
        tl.store(old_ptr, old)


@pytest.mark.parametrize("wanted", [0, 2])
def test_masked_scalars(wanted):
    p, old = torch.tensor([5]), torch.tensor([-1])
    _scalar[(1,)](p, old, wanted)
    assert (p.item(), old.item()) == ((8, 5) if wanted else (5, -1))
