"""A launch reaches the kernel with the right arguments and grid, or says which argument is wrong."""

import struct
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from vllm_triton.compile.triton_cpu import settings

COPY_SLOTS = "for (int i = 0; i < {count}; ++i) reinterpret_cast<uint64_t*>(args[0])[i] = args[i];"
COUNT_PROGRAMS = """
    int64_t program = pid_x + int64_t(num_x) * (pid_y + int64_t(num_y) * pid_z);
    counter(args[0], 0).fetch_add(1);
    counter(args[0], int(1 + program)).fetch_add(1 + pid_x * 1000000ll + pid_y * 1000 + pid_z);
"""


def float_bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def test_launcher_is_the_one_asked_for(native_kernel):
    def _nothing(out):
        pass

    out = torch.zeros(1)
    kernel = native_kernel(_nothing, "")[(1,)](out)
    by_ctypes = type(kernel.run).__module__.endswith("triton_cpu.launcher")
    assert by_ctypes == (settings.launcher() == "ctypes")


def test_slots_hold_every_kind_of_argument(native_kernel):
    def _copy_slots(out, small, negative, large, huge, flag, real, second, nothing, one, SIZE: tl.constexpr, last):
        pass

    out = torch.zeros(16, dtype=torch.int64)
    second = torch.zeros(3, dtype=torch.bfloat16)
    kernel = native_kernel(_copy_slots, COPY_SLOTS.format(count=9))
    kernel[(1,)](out, 7, -5, 2**40, 2**63 + 3, True, 1.5, second[1:], None, 1, SIZE=64, last=-(2**35))
    expected = [out.data_ptr(), 7, -5, 2**40, 3 - 2**63, 1, float_bits(1.5), second.data_ptr() + 2, -(2**35)]
    assert out[:9].tolist() == expected


def test_annotated_arguments(native_kernel):
    def _annotated(out, byte: tl.int8, unsigned: tl.uint32, double: tl.float64, half: tl.float16, brain: tl.bfloat16):
        pass

    out = torch.zeros(6, dtype=torch.int64)
    native_kernel(_annotated, COPY_SLOTS.format(count=6))[(1,)](out, -3, 2**32 - 1, 0.1, 0.5, 3)
    double_bits = struct.unpack("<q", struct.pack("<d", 0.1))[0]
    assert out[1:].tolist() == [-3, 2**32 - 1, double_bits, float_bits(0.5), float_bits(3.0)]


class Pair(NamedTuple):
    first: object
    second: object


def test_tuples_are_flattened(native_kernel):
    def _tuples(out, pair, last):
        pass

    out = torch.zeros(5, dtype=torch.int64)
    other = torch.zeros(1)
    kernel = native_kernel(_tuples, COPY_SLOTS.format(count=5))
    kernel[(1,)](out, Pair(other, (4, -9, 1)), 12)
    assert out.tolist() == [out.data_ptr(), other.data_ptr(), 4, -9, 12]


def test_descriptors_become_pointer_shape_and_strides(native_kernel):
    from triton.tools.tensor_descriptor import TensorDescriptor

    def _descriptor(out, descriptor, last):
        pass

    out = torch.zeros(12, dtype=torch.int64)
    base = torch.zeros(8, 32)
    flags = [0, 0] if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__ else [0]
    expected = [base.data_ptr(), 8, 32, 32, 1, *flags, 8, 32, 32, 1]
    kernel = native_kernel(_descriptor, COPY_SLOTS.format(count=1 + len(expected)))
    kernel[(1,)](out, TensorDescriptor(base, [8, 32], [32, 1], [4, 16]), 5)
    assert out[1 : 1 + len(expected)].tolist() == expected


@pytest.mark.parametrize("grid", [(1,), (7,), (5, 3), (3, 4, 5), (1, 1, 9), (257, 2, 2)])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_program_runs_once(native_kernel, grid, threads):
    def _count(out):
        pass

    torch.set_num_threads(threads)
    x, y, z = (*grid, 1, 1)[:3]
    out = torch.zeros(1 + x * y * z, dtype=torch.int64)
    kernel = native_kernel(_count, COUNT_PROGRAMS)
    kernel[lambda meta: grid](out)
    ids = [1 + i * 1000000 + j * 1000 + k for k in range(z) for j in range(y) for i in range(x)]
    assert out.tolist() == [x * y * z, *ids]
    for _ in range(20):  # short launches take another path once they are known to be short
        kernel[grid](out)
    assert out[1:].tolist() == [21 * value for value in ids]


def test_empty_grid_runs_nothing(native_kernel):
    def _count_none(out):
        pass

    out = torch.zeros(4, dtype=torch.int64)
    native_kernel(_count_none, COUNT_PROGRAMS)[(2, 0)](out)
    assert out.tolist() == [0, 0, 0, 0]


@pytest.fixture
def two_arguments(native_kernel):
    def _two(data, number: tl.int32):
        pass

    return native_kernel(_two, "")


def test_tensor_elsewhere_is_refused_by_name(two_arguments):
    with pytest.raises(ValueError, match=r"_two: argument 'data' must be a CPU tensor, got one on meta: .*\.cpu\(\)"):
        two_arguments[(1,)](torch.zeros(4, device="meta"), 2)


def test_argument_out_of_range_is_refused_by_name(two_arguments):
    with pytest.raises(OverflowError, match=r"_two: argument 'number' must fit i32, got 2147483648"):
        two_arguments[(1,)](torch.zeros(4), 2**31)


def test_wrong_kinds_are_refused_by_name(two_arguments):
    kernel = two_arguments[(1,)](torch.zeros(4), 2)
    with pytest.raises(TypeError, match="_two: argument 'data' must be a CPU tensor, got int"):
        kernel[(1, 1, 1)](4096, 2)
    with pytest.raises(TypeError, match="_two: argument 'number' must be an integer, got float"):
        kernel[(1, 1, 1)](torch.zeros(4), 2.5)
    with pytest.raises(TypeError, match=r"_two: .* got 1"):
        kernel.run(1, 1, 1, 0, kernel.function, None, None, None, None, torch.zeros(4))
    with pytest.raises(ValueError, match=r"_two: grid\[1\] must be from 0 to 2\*\*31 - 1, got -1"):
        kernel[(1, -1, 1)](torch.zeros(4), 2)


def test_float_argument_must_be_a_number(native_kernel):
    def _float(data, scale: tl.float32):
        pass

    kernel = native_kernel(_float, "")
    with pytest.raises(TypeError, match="_float: argument 'scale' must be a number, got str"):
        kernel[(1,)](torch.zeros(4), "half")


def test_hooks_are_called_around_a_launch(native_kernel):
    def _set(out):
        pass

    out = torch.zeros(1, dtype=torch.int64)
    seen = []
    enter = lambda metadata: seen.append(("enter", metadata.get()["name"], int(out[0])))
    leave = lambda metadata: seen.append(("exit", metadata.get()["name"], int(out[0])))
    triton.knobs.runtime.launch_enter_hook.add(enter)
    triton.knobs.runtime.launch_exit_hook.add(leave)
    try:
        native_kernel(_set, "counter(args[0], 0).store(42);")[(1,)](out)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
        triton.knobs.runtime.launch_exit_hook.remove(leave)
    assert seen == [("enter", "_set", 0), ("exit", "_set", 42)]


def test_failing_hook_stops_the_launch(native_kernel):
    def _not_set(out):
        pass

    def refuse(metadata):
        raise KeyError("refused")

    out = torch.zeros(1, dtype=torch.int64)
    triton.knobs.runtime.launch_enter_hook.add(refuse)
    try:
        with pytest.raises(KeyError, match="refused"):
            native_kernel(_not_set, "counter(args[0], 0).store(42);")[(1,)](out)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(refuse)
    assert out.item() == 0


def test_bench_and_autotune(native_kernel):
    def _sized(out, SIZE: tl.constexpr):
        pass

    configs = [triton.Config({"SIZE": size}, num_warps=warps) for size in (16, 32) for warps in (1, 8)]
    kernel = triton.autotune(configs, key=[])(native_kernel(_sized, "counter(args[0], 0).fetch_add(1);"))
    out = torch.zeros(1, dtype=torch.int64)
    kernel[(2,)](out)
    assert kernel.best_config in configs
    assert out.item() > 2 * len(configs)
    assert triton.testing.do_bench(lambda: kernel[(2,)](out), warmup=1, rep=1) > 0


def test_driver_describes_the_cpu(driver):
    assert driver.get_current_target().backend == "cpu"
    assert driver.get_active_torch_device() == torch.device("cpu")
    assert driver.map_python_to_cpp_type("*fp32") == "void*"
    assert driver.map_python_to_cpp_type("u16") == "uint16_t"
    with pytest.raises(RuntimeError, match="no C\\+\\+ type for 'fp12'"):
        driver.map_python_to_cpp_type("fp12")
    with pytest.raises(ValueError, match="device 0"):
        driver.set_current_device(1)
