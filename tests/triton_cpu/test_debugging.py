"""What kernels print, and what they assert: the first failure of a launch becomes an exception."""

import re
import threading

import pytest
import torch
import triton
import triton.language as tl

from vllm_triton.compile.triton_cpu.errors import KernelAssertionError, KernelError
from vllm_triton.compile.triton_cpu.launching import LaunchList, recording


@triton.jit
def _prints(x_ptr, n, N: tl.constexpr):
    program = tl.program_id(1)
    x = tl.load(x_ptr + program * N + tl.arange(0, N))
    print("x", x)
    tl.device_print("both", n + program, x > 1)
    tl.device_print("done")


def test_print_writes_one_line_for_each_element(capfd):
    x = torch.tensor([[0.5, -2.0], [3.25, float("inf")]])
    _prints[(1, 2)](x, 7, 2)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        line
        for p, (values, flags) in enumerate(((("0.500000", "-2.000000"), (0, 0)), (("3.250000", "inf"), (1, 1))))
        for line in (
            *(f"pid (0, {p}, 0) idx ({i}) x: {value}" for i, value in enumerate(values)),
            f"pid (0, {p}, 0) idx () both: (operand 0) {7 + p}",
            *(f"pid (0, {p}, 0) idx ({i}) both: (operand 1) {flag}" for i, flag in enumerate(flags)),
            f"pid (0, {p}, 0) done",
        )
    ]


@triton.jit
def _prints_tile(x_ptr, HEX: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    places = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.device_print("", tl.load(x_ptr + places), hex=HEX)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.uint64, torch.float16, torch.float64])
@pytest.mark.parametrize("is_hex", [False, True])
def test_print_shows_every_index_and_type(capfd, dtype, is_hex):
    x = torch.arange(64).to(dtype).view(2, 32)
    if dtype.is_floating_point:
        x[1, 31], x[0, 1] = -1.5, 0.25
    else:
        x.view(torch.uint8)[1, -dtype.itemsize :] = 255  # -1, or the largest
    _prints_tile[(1,)](x, is_hex, 2, 32)
    lines = capfd.readouterr().out.splitlines()
    bits = x.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[dtype.itemsize])
    expected = []
    for i in range(2):
        for j in range(32):
            text = f"{x[i, j].item():f}" if dtype.is_floating_point else str(x[i, j].item())
            text = f"0x{bits[i, j].item():0{2 * dtype.itemsize}x}" if is_hex else text
            expected.append(f"pid (0, 0, 0) idx ({i}, {j}): {text}")
    assert lines == expected


def test_threads_print_whole_lines(capfd):
    torch.set_num_threads(4)
    x = torch.ones(400, 2)
    _prints[(1, 400)](x, 0, 2)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 400 * 6
    pattern = re.compile(r"pid \(0, (\d+), 0\) (done|idx \(\d?\) (x|both): (\(operand \d\) )?[\d.]+)$")
    seen = [pattern.match(line) for line in lines]
    assert all(seen) and {int(match[1]) for match in seen} == set(range(400))


@triton.jit
def _asserts(x_ptr, out_ptr, limit, N: tl.constexpr):
    program = tl.program_id(0)
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + program * N + offsets)
    tl.device_assert(x < limit, 'x is "small" (50% of é)')
    tl.store(out_ptr + program * N + offsets, x)


def _line(function, text: str) -> int:
    source, first = function.raw_src, function.starting_line_number
    return first + next(number for number, line in enumerate(source) if text in line)


@pytest.mark.parametrize("n", [4, 64])
def test_assertion_names_kernel_line_program_index_and_message(n):
    x, out = torch.arange(3 * n).float(), torch.full((3 * n,), -1.0)
    _asserts[(3,)](x, out, 3.0 * n, n, debug=True)
    assert torch.equal(out, x)
    with pytest.raises(KernelAssertionError) as caught:
        _asserts[(3,)](x, out, 2.0 * n + 2, n, debug=True)
    assert re.fullmatch(
        rf"_asserts: .*test_debugging\.py:{_line(_asserts, 'device_assert')}: program \(2, 0, 0\): "
        r'assertion failed at index \(2\): x is "small" \(50% of é\)',
        str(caught.value),
    )
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, KernelError)


def test_assertions_are_not_compiled_without_debug():
    x, out = torch.ones(4), torch.zeros(4)
    _asserts[(1,)](x, out, 0.0, 4)
    assert out.tolist() == [1, 1, 1, 1]


@triton.jit
def _asserts_some(x_ptr, out_ptr, n, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.device_assert(tl.where(offsets < n, x, 1.0) > 0, "positive", mask=offsets < n + 1)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


@pytest.mark.parametrize("wrong", [1, 20, 40])
def test_assertion_under_a_mask_ends_the_program(wrong):
    x, out = torch.ones(64), torch.zeros(64)
    x[wrong] = -1
    with pytest.raises(KernelAssertionError, match=rf"at index \({wrong}\): positive"):
        _asserts_some[(1,)](x, out, 50, 64, debug=True)
    assert bool((out == 0).all())
    _asserts_some[(1,)](x, out, wrong, 64, debug=True)
    assert out.sum() == wrong


@triton.jit(noinline=True)
def _root(x):
    tl.device_assert(x >= 0, "x must not be negative")
    return tl.sqrt(x)


@triton.jit
def _roots(x_ptr, out_ptr, N: tl.constexpr):
    for i in range(N):
        tl.store(out_ptr + i, _root(tl.load(x_ptr + i)))


def test_a_called_function_ends_its_caller():
    x, out = torch.tensor([4.0, 9.0, -1.0, 16.0]), torch.zeros(4)
    with pytest.raises(KernelAssertionError, match=r"_roots: .*: assertion failed: x must not be negative"):
        _roots[(1,)](x, out, 4, debug=True)
    assert out.tolist() == [2, 3, 0, 0]


@triton.jit
def _counts(counter_ptr, limit):
    program = tl.program_id(0)
    tl.device_assert(program < limit)
    tl.atomic_add(counter_ptr, 1)


@pytest.mark.parametrize("threads", [1, 4])
def test_no_program_starts_after_a_failure(threads):
    torch.set_num_threads(threads)
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelAssertionError, match=r"program \(\d+, 0, 0\): assertion failed"):
        _counts[(100_000,)](counter, 0, debug=True)
    assert counter.item() == 0
    _counts[(100,)](counter, 100, debug=True)  # the next launch knows nothing of it
    assert counter.item() == 100
    if threads == 1:
        for _ in range(10):  # until the launch is known to be short
            with pytest.raises(KernelAssertionError, match=r"program \(5, 0, 0\)"):
                _counts[(100,)](counter, 5, debug=True)
        assert counter.item() == 150


def test_overflow_is_reported_in_debug_mode():
    @triton.jit
    def _adds(x_ptr, y):
        tl.store(x_ptr, tl.load(x_ptr) + y)

    x = torch.tensor([2**31 - 5], dtype=torch.int32)
    _adds[(1,)](x, 4, debug=True)
    with pytest.raises(KernelAssertionError, match="int32 overflow detected for operation add"):
        _adds[(1,)](x, 4, debug=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_replay_ends_with_the_launch_that_fails(threads):
    torch.set_num_threads(threads)
    first, second = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    launches = LaunchList()
    with recording(launches):
        _counts[(10,)](first, 10, debug=True)
        _counts[(10,)](first, 3, debug=True)
        _counts[(10,)](second, 10, debug=True)
    for _ in range(3):
        first.zero_()
        with pytest.raises(KernelAssertionError, match=r"_counts: "):
            launches.replay()
        assert 10 <= first.item() < 20 and second.item() == 0


def test_python_threads_get_their_own_failures():
    outcomes = {}

    def launch(number: int) -> None:
        counter = torch.zeros(1, dtype=torch.int32)
        found = []
        for turn in range(50):
            limit = 200 if (number + turn) % 2 else number
            try:
                _counts[(200,)](counter, limit, debug=True)
                found.append(None)
            except KernelAssertionError as error:
                found.append(int(re.search(r"program \((\d+),", str(error))[1]))
        outcomes[number] = found

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, found in outcomes.items():
        for turn, failed in enumerate(found):
            assert failed is None if (number + turn) % 2 else failed >= number
