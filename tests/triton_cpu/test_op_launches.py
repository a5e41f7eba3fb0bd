"""`ops.launch.launch` finds the code again that Triton would have chosen."""

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from vllm_triton.ops.launch import compiling_ahead, launch


@triton.jit(do_not_specialize=["any_number"])
def _sum_kernel(out_ptr, x_ptr, number, any_number, scale: tl.float32, C: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    x = 0 if x_ptr is None else tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x + number + any_number + scale.to(tl.int32) + C)


def _launched(dtype, with_x=True, number=1, any_number=1, scale=1.0, constant=0, programs=2):
    out, x = torch.zeros(8, dtype=dtype), torch.arange(8).to(dtype)
    tensors, numbers = (out, x if with_x else None), (number, any_number, scale)
    launch(_sum_kernel, (programs,), tensors, numbers, (constant, 4), num_warps=1)
    expected = with_x * torch.arange(8) + number + any_number + int(scale) + constant
    expected[4 * programs :] = 0
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("repeats", [1, 3])
def test_every_change_of_an_argument_counts(repeats):
    changes = [{}, {"with_x": False}, {"scale": 3.0}, {"constant": 4}, {"programs": 1}]
    changes += [{name: value} for name in ("number", "any_number") for value in (-5, 2, 16, 17, 2**33)]
    for dtype in (torch.int64, torch.float64, torch.int32):
        for changed in changes:
            for _ in range(repeats if dtype != torch.int32 or 2**33 not in changed.values() else 0):
                _launched(dtype, **changed)


def test_unaligned_tensors_share_the_code():
    buffer, out = torch.arange(9.0), torch.zeros(9)
    for start in (0, 1, 0):
        launch(_sum_kernel, (2,), (out[start : start + 8], buffer[start : start + 8]), (1, 1, 1.0), (0, 4))
        assert torch.equal(out[start : start + 8], buffer[start : start + 8] + 3)


def test_hooks_see_every_launch():
    seen = []
    hook = lambda metadata: seen.append(metadata.get()["name"])
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(3):
            _launched(torch.float32)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    _launched(torch.float32)
    assert seen == ["_sum_kernel"] * 3


def test_an_argument_that_the_kernel_cannot_take_is_named():
    _launched(torch.float32)
    with pytest.raises(ValueError, match=r"_sum_kernel: argument 'x_ptr' must be a CPU tensor, got one on meta"):
        launch(_sum_kernel, (2,), (torch.zeros(8), torch.zeros(8, device="meta")), (1, 1, 1.0), (0, 4))


@triton.jit
def _fill_kernel(out_ptr, C: tl.constexpr = 3):
    tl.store(out_ptr + tl.program_id(0), C)


def test_a_kernel_without_numbers():
    for constant in (1, 2, 1):
        out = torch.zeros(3)
        launch(_fill_kernel, (3,), (out,), (), (constant,))
        assert torch.equal(out, torch.full((3,), float(constant)))


def test_every_argument_is_asked_for():
    with pytest.raises(TypeError, match="_fill_kernel: takes 2 arguments, got 1"):
        launch(_fill_kernel, (3,), (torch.zeros(3),), (), ())


@triton.jit
def _scale_kernel(x_ptr, out_ptr, factor: tl.float32, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * factor)


def test_kernels_compile_ahead_and_nothing_runs():
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["repr"])
    try:
        x, out = torch.ones(16), torch.zeros(16)
        with compiling_ahead(2):
            for size in (8, 8, 16):
                launch(_scale_kernel, (1,), (x, out), (2.0,), (size,))
            assert not compiled
        assert len(compiled) == 2 and not out.any()
        launch(_scale_kernel, (1,), (x, out), (2.0,), (8,))
        assert len(compiled) == 2 and out.tolist() == [2.0] * 8 + [0.0] * 8
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


@triton.jit
def _wrong_kernel(out_ptr):
    tl.store(out_ptr, undefined_name)  # noqa: F821


def test_what_fails_to_compile_ahead_is_raised():
    with pytest.raises(CompilationError, match="undefined_name"), compiling_ahead(2):
        launch(_wrong_kernel, (1,), (torch.ones(8),), (), ())
    out = torch.zeros(16)
    launch(_scale_kernel, (1,), (torch.ones(16), out), (3.0,), (16,))  # launches run again
    assert out.sum() == 48
