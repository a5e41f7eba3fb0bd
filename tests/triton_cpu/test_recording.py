"""A launch list writes launches down and runs them again, in order, without Python."""

import gc
import threading

import pytest
import torch
import triton

from vllm_triton.compile.triton_cpu.errors import RecordingError
from vllm_triton.compile.triton_cpu.launching import LaunchList, is_recording, recording

# Each program adds `number` to its own element after doubling it: the order of launches shows.
DOUBLE_AND_ADD = "auto& mine = counter(args[0], pid_x); mine.store(mine.load() * 2 + int64_t(args[1]));"


@pytest.fixture
def double_and_add(native_kernel):
    def _double_and_add(out, number):
        pass

    return native_kernel(_double_and_add, DOUBLE_AND_ADD)


@pytest.mark.parametrize("threads", [1, 2])
def test_replay_runs_what_was_recorded_in_order(double_and_add, driver, threads):
    torch.set_num_threads(threads)
    out = torch.ones(5, dtype=torch.int64)
    launches = driver.LaunchList()
    with driver.recording(launches) as recorded:
        double_and_add[(5,)](out, 3)
        double_and_add[(4,)](out, -2)
        double_and_add[(0,)](out, 100)
    assert recorded is launches and len(launches) == 2
    assert out.tolist() == [1] * 5
    launches.replay()
    assert out.tolist() == [8, 8, 8, 8, 5]
    out.fill_(10)
    launches.replay()
    assert out.tolist() == [44, 44, 44, 44, 23]
    double_and_add[(5,)](out, 0)
    assert out[4] == 46


def test_long_lists_over_a_team(native_kernel):
    def _sum_neighbours(source, target):
        pass

    # Every element needs its neighbours of the launch before: a launch must not start before the last has ended.
    body = """
    const int64_t size = num_x;
    counter(args[1], pid_x).store(counter(args[0], (pid_x + 1) % size).load() + counter(args[0], pid_x).load());
    """
    torch.set_num_threads(3)
    size, steps = 4000, 40
    first = torch.arange(size)
    second = torch.zeros_like(first)
    kernel = native_kernel(_sum_neighbours, body)
    launches = LaunchList()
    with recording(launches):
        for step in range(steps):
            kernel[(size,)](*((first, second) if step % 2 == 0 else (second, first)))
    expected = first.clone()
    for _ in range(steps):
        expected = expected + expected.roll(-1)
    launches.replay()
    assert torch.equal(first, expected)


def test_append_takes_packed_arguments(double_and_add):
    out = torch.zeros(3, dtype=torch.int64)
    kernel = double_and_add[(3,)](out, 1000)
    launches = LaunchList()
    launches.append(kernel.function, [out.data_ptr(), 2**64 - 7], (3, 1, 1))
    launches.append(kernel.function, [out.data_ptr(), 5], (0, 1, 1))
    assert len(launches) == 1
    launches.replay()
    assert out.tolist() == [1993] * 3


def test_other_threads_run_while_one_records(double_and_add):
    out = torch.zeros(2, dtype=torch.int64)
    launches = LaunchList()
    with recording(launches):
        thread = threading.Thread(target=lambda: double_and_add[(2,)](out, 9))
        thread.start()
        thread.join()
        assert is_recording()
    assert out.tolist() == [9, 9] and len(launches) == 0


def test_recording_ends_with_an_error(double_and_add):
    out = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(KeyError, match="stop"), recording(LaunchList()):
        raise KeyError("stop")
    assert not is_recording()
    double_and_add[(1,)](out, 4)
    assert out.item() == 4


def test_what_cannot_be_recorded_says_so(double_and_add):
    out = torch.zeros(1, dtype=torch.int64)
    launches = LaunchList()
    with recording(launches):
        with pytest.raises(RecordingError, match="cannot start a recording"), recording(LaunchList()):
            pass
        with pytest.raises(RecordingError, match="cannot replay a launch list"):
            launches.replay()
        with pytest.raises(RecordingError, match="cannot wait for launches"):
            triton.testing.do_bench(lambda: double_and_add[(1,)](out, 1))
    assert out.item() == 0


def test_list_keeps_its_kernels(native_kernel):
    def _short_lived(out):
        pass

    out = torch.zeros(1, dtype=torch.int64)
    launches = LaunchList()
    kernel = native_kernel(_short_lived, "counter(args[0], 0).fetch_add(1);")
    with recording(launches):
        kernel[(1,)](out)
    kernel.device_caches.clear()
    del kernel
    gc.collect()
    launches.replay()
    assert out.item() == 1
