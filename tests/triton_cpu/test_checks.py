"""Bounds checks: an access beyond the tensor that its pointer came from raises; every other one is let through."""

import re

import pytest
import torch
import triton
import triton.language as tl

from vllm_triton.compile.triton_cpu import extents
from vllm_triton.compile.triton_cpu.errors import OutOfBoundsError, SettingError
from vllm_triton.compile.triton_cpu.launching import LaunchList, recording


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    monkeypatch.setenv("VLLM_TRITON_CPU_CHECK", "1")


@triton.jit
def _copy(x_ptr, out_ptr, x_start, out_start, n, N: tl.constexpr):
    offsets = tl.arange(0, N)
    mask = offsets < n
    tl.store(out_ptr + out_start + offsets, tl.load(x_ptr + x_start + offsets, mask=mask), mask=mask)


def _inside(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A view with neighbours on either side: what a failed check would touch is no stranger's."""
    return torch.full((size + 256,), 7).to(dtype)[128 : 128 + size]


@pytest.mark.parametrize("size, block", [(3, 4), (16, 16), (50, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_masked_lanes_may_lie_anywhere(size, block, dtype):
    x, out = torch.arange(size).to(dtype), _inside(size, dtype)
    _copy[(1,)](x, out, 0, 0, size, block)
    assert torch.equal(out, x)


@pytest.mark.parametrize("size, block", [(3, 4), (16, 16), (50, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_one_element_too_far(size, block, dtype):
    x, out = _inside(size, dtype), _inside(size, dtype)
    storage = out._base.clone()
    name, last = re.escape(f"[{size}]"), size - 1
    with pytest.raises(OutOfBoundsError, match=rf"load of x_ptr{name} at index \({last}\): .*ends at x_ptr\[{last}\]"):
        _copy[(1,)](x, out, 1, 0, size, block)
    with pytest.raises(OutOfBoundsError, match=rf"store to out_ptr{name} at index \({last}\): .*out_ptr\[{last}\]"):
        _copy[(1,)](x, out, 0, 1, size, block)
    with pytest.raises(OutOfBoundsError, match=r"load of x_ptr\[-1\] at index \(0\): the tensor begins at x_ptr\[0\]"):
        _copy[(1,)](x, out, -1, 0, size, block)
    with pytest.raises(OutOfBoundsError, match=r"store to out_ptr\[-1\] at index \(0\): the tensor begins at out_ptr"):
        _copy[(1,)](x, out, 0, -1, size, block)
    assert torch.equal(out._base, storage)


def test_message_names_kernel_line_and_program():
    @triton.jit
    def _fills(x_ptr):
        tl.store(x_ptr + tl.program_id(1), 1.0)

    x = torch.zeros(5)
    with pytest.raises(OutOfBoundsError) as caught:
        _fills[(1, 6)](x)
    line = _fills.starting_line_number + 2
    expected = (
        rf"_fills: .*test_checks\.py:{line}: program \(0, 5, 0\): store to x_ptr\[5\]: the tensor ends at x_ptr\[4\]"
    )
    assert re.fullmatch(expected, str(caught.value)) and isinstance(caught.value, IndexError)
    assert x.tolist() == [1] * 5


@triton.jit
def _at(x_ptr, index_ptr, out_ptr, KIND: tl.constexpr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    index = tl.load(index_ptr + lanes)
    if KIND == "gather":
        tl.store(out_ptr + lanes, tl.load(x_ptr + index))
    elif KIND == "scatter":
        tl.store(x_ptr + index, lanes)
    elif KIND == "add":
        tl.atomic_add(x_ptr + index, 1, mask=lanes > 0)
    elif KIND == "swap":
        tl.atomic_cas(x_ptr + index, lanes, lanes + 1)
    elif KIND == "scalar":
        tl.store(out_ptr, tl.load(x_ptr + tl.load(index_ptr + 1)))
    elif KIND == "scalar add":
        tl.atomic_add(x_ptr + tl.load(index_ptr + 1), 1)
    elif KIND == "tile gather":
        tl.store(out_ptr + lanes, tl.gather(tl.load(x_ptr + lanes), index, 0))


@pytest.mark.parametrize("n", [2, 16, 32])
@pytest.mark.parametrize("kind", ["gather", "scatter", "add", "swap", "scalar", "scalar add", "tile gather"])
def test_every_kind_of_access(kind, n):
    def launch(wrong: int | None) -> None:
        x, index, out = (_inside(n, torch.int32) for _ in range(3))
        index.copy_(torch.arange(n).flip(0))
        if wrong is not None:
            index[1] = wrong
        _at[(1,)](x, index, out, kind, n)

    launch(None)
    for wrong in (n, -1, 2**30, -(2**31)):
        with pytest.raises(OutOfBoundsError, match=rf"[\[ ]{wrong}\D"):
            launch(wrong)


@triton.jit
def _read_tile(x_ptr, out_ptr, row_stride, column_stride, first, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + first + rows * row_stride + columns * column_stride)
    tl.store(out_ptr + rows * N + columns, x)


def test_a_view_ends_where_its_last_element_lies():
    storage = torch.arange(400.0)
    view = storage[100:300].view(10, 20)[:4, :8]
    out = torch.empty(4, 8)
    _read_tile[(1,)](view, out, 20, 1, 0, 4, 8)
    assert torch.equal(out, view)
    with pytest.raises(
        OutOfBoundsError, match=r"load of x_ptr\[80\] at index \(3, 0\): the tensor ends at x_ptr\[67\]"
    ):
        _read_tile[(1,)](view, out, 20, 1, 20, 4, 8)
    with pytest.raises(OutOfBoundsError, match=r"load of x_ptr\[8\] at index \(0, 0\): no element of the tensor lies"):
        _read_tile[(1,)](view, out, 20, 1, 8, 1, 8)
    with pytest.raises(OutOfBoundsError, match=r"load of x_ptr\[8\] at index \(1, 0\): no element"):
        _read_tile[(1,)](view, out, 8, 1, 0, 4, 8)
    with pytest.raises(OutOfBoundsError, match=r"load of x_ptr\[-1\]"):
        _read_tile[(1,)](view, out, 20, 1, -1, 4, 8)


@pytest.mark.parametrize("make", [lambda x: x.T, lambda x: x[::2], lambda x: x[:, ::4], lambda x: x[:1].expand(8, 16)])
def test_strided_views(make):
    view = make(torch.arange(128.0).view(8, 16))
    out = torch.empty(view.shape)
    _read_tile[(1,)](view, out, *view.stride(), 0, *view.shape)
    assert torch.equal(out, view)
    with pytest.raises(OutOfBoundsError):
        _read_tile[(1,)](view, out, *view.stride(), 1 if view.stride(1) > 1 or view.stride(0) > 16 else 16, *view.shape)


@pytest.mark.parametrize(
    "view, expected",
    [
        (torch.empty(3, 4, dtype=torch.int16), [(24, 1)]),
        (torch.empty(3, 4).T, [(48, 1)]),
        (torch.empty(3, 8)[:, :4], [(3, 32), (16, 1)]),
        (torch.empty(6, 8)[::2, ::4], [(3, 64), (2, 16), (4, 1)]),
        (torch.empty(1).expand(5, 7), [(4, 1)]),
        (torch.empty(0, 4), [(0, 1)]),
        (torch.empty(20).as_strided((4, 6), (2, 1)), [(48, 1)]),
        (torch.empty(()), [(4, 1)]),
        (torch.empty(2, 3, 4)[:, 1], [(2, 48), (16, 1)]),
    ],
)
def test_extents(view, expected):
    assert extents.extent(view) == expected


@pytest.mark.parametrize("shape, strides", [((3, 4), (9, 2)), ((2, 3, 2), (30, 8, 3)), ((5,), (3,)), ((4, 3), (2, 3))])
def test_extents_hold_what_indices_reach(shape, strides):
    """Against every offset, by the rule that runtime/bounds.h applies."""
    pairs = extents.extent(torch.empty(100, dtype=torch.int8).as_strided(shape, strides))
    reached = {0}
    for size, stride in zip(shape, strides, strict=True):
        reached = {offset + index * stride for offset in reached for index in range(size)}
    held = {0}
    for count, stride in pairs:
        held = {offset + index * stride for offset in held for index in range(count)}
    assert held >= reached and (max(held), min(held)) == (max(reached), 0)
    if shape != (4, 3):  # whose elements cross: all in between are let through
        assert held == reached


@triton.jit(noinline=True)
def _load(p, i):
    return tl.load(p + i)


@triton.jit
def _wanders(x_ptr, y_ptr, out_ptr, steps, pick, N: tl.constexpr):
    lanes = tl.arange(0, N)
    p = x_ptr
    if pick > 0:
        p = y_ptr
    total = tl.zeros([N], dtype=tl.float32)
    ptrs = p + lanes
    for _ in range(steps):
        total += tl.load(ptrs)
        ptrs += N
    tl.store(out_ptr + lanes, total + _load(p, steps * N - 1))


def test_pointers_are_followed_through_branches_loops_and_calls():
    x, y, out = torch.ones(64), torch.ones(128), torch.empty(16)
    _wanders[(1,)](x, y, out, 4, 0, 16)
    _wanders[(1,)](x, y, out, 8, 3, 16)
    with pytest.raises(OutOfBoundsError, match=r"load of y_ptr\[128\] at index \(0\): .* y_ptr\[127\]"):
        _wanders[(1,)](x, y, out, 9, 3, 16)
    storage = torch.ones(300)  # neither x nor y may be left for what lies between
    x, y = storage[:64], storage[96:]
    with pytest.raises(OutOfBoundsError, match=r"load of [xy]_ptr\[(64|-32)\] at index \(0\)"):
        _wanders[(1,)](x, y, out, 5, 0, 16)
    with pytest.raises(OutOfBoundsError, match=r"test_checks\.py:\d+: .*: load of [xy]_ptr\[-1\]: "):
        _wanders[(1,)](x, x, out, 0, 0, 16)


@triton.jit
def _through_table(table_ptr, out_ptr, N: tl.constexpr):
    p = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + tl.arange(0, N), tl.load(p + tl.arange(0, N)))


def test_pointers_out_of_memory_are_not_checked():
    x, out = torch.arange(16.0), torch.empty(16)
    _through_table[(1,)](torch.tensor([x.data_ptr()]), out, 16)
    assert torch.equal(out, x)


@triton.jit
def _descriptor(x_ptr, out_ptr, m, n, row_stride, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[m, n], strides=[row_stride, 1], block_shape=[N, N])
    out = tl.make_tensor_descriptor(out_ptr, shape=[m, n], strides=[n, 1], block_shape=[N, N])
    out.store([0, 0], x.load([0, 0]))


def test_descriptors_mask_by_their_shape():
    x, out = torch.randn(6, 40)[:, :8], torch.zeros(6, 8)
    _descriptor[(1,)](x, out, 6, 8, 40, 16)
    assert torch.equal(out, x)
    with pytest.raises(OutOfBoundsError, match=r"load of x_ptr"):
        _descriptor[(1,)](x, torch.zeros(7, 8), 7, 8, 40, 16)


def test_empty_tensors_and_tensors_of_no_axis():
    x, out = torch.tensor(3.0), torch.zeros(1)
    _copy[(1,)](x, out, 0, 0, 1, 4)
    assert out.item() == 3
    with pytest.raises(OutOfBoundsError, match="the tensor is empty"):
        _copy[(1,)](torch.empty(0), out, 0, 0, 1, 4)
    _copy[(1,)](torch.empty(0), out, 0, 0, 0, 4)


def test_reinterpreted_tensors():
    x, out = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _copy[(1,)](triton.reinterpret(x, tl.uint32), out, 0, 0, 8, 8)
    assert torch.equal(out, x)
    with pytest.raises(OutOfBoundsError, match=r"load of x_ptr\[8\]"):
        _copy[(1,)](triton.reinterpret(x, tl.uint32), out, 1, 0, 8, 8)


@pytest.mark.parametrize("threads", [1, 2])
def test_recorded_launches_keep_their_extents(threads):
    torch.set_num_threads(threads)
    x, out, other = torch.arange(8.0), torch.zeros(8), torch.zeros(8)
    launches = LaunchList()
    with recording(launches):
        _copy[(1,)](x, out, 0, 0, 8, 8)
        kernel = _copy[(1,)](x, other, 1, 0, 8, 8)
    for _ in range(3):
        with pytest.raises(OutOfBoundsError, match=r"load of x_ptr\[8\]"):
            launches.replay()
        assert torch.equal(out, x) and bool((other == 0).all())
    by_address = LaunchList()
    wide = torch.arange(9.0)
    by_address.append(kernel.function, [wide.data_ptr(), other.data_ptr(), 0, 8], (1, 1, 1))  # the 1 is a constexpr
    by_address.replay()  # addresses alone have no extent
    assert torch.equal(other, wide[1:])


def test_the_setting_is_part_of_the_key(monkeypatch):
    @triton.jit
    def _one(x_ptr):
        tl.store(x_ptr + 1, 5.0)

    def fails(checked: str) -> bool:
        monkeypatch.setenv("VLLM_TRITON_CPU_CHECK", checked)
        _one.device_caches.clear()
        x = torch.zeros(2)
        try:
            _one[(1,)](x[:1])
        except OutOfBoundsError:
            return True
        assert x.tolist() == [0, 5]
        return False

    assert [fails(checked) for checked in "1010"] == [True, False, True, False]
    monkeypatch.setenv("VLLM_TRITON_CPU_CHECK", "yes")
    _one.device_caches.clear()
    with pytest.raises(SettingError, match="VLLM_TRITON_CPU_CHECK must be one of 0, 1, got 'yes'"):
        _one[(1,)](torch.zeros(2))
