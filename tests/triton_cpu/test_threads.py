"""The team: as many threads as torch says, claimed work, several launching threads, forks."""

import os
import signal
import threading

import pytest
import torch

from vllm_triton.compile.triton_cpu import library

# Every program waits until `wanted` of them are under way, which takes as many threads.
MEET = """
    counter(args[0], 0).fetch_add(1);
    if (wait_for(counter(args[0], 0), int64_t(args[1]))) counter(args[0], 1).fetch_add(1);
"""
# Waits for another Python thread to write.
WAIT_FOR_PYTHON = """
    counter(args[0], 0).fetch_add(1);
    if (wait_for(counter(args[0], 1), 1)) counter(args[0], 2).fetch_add(1);
"""
ADD_ONE = "counter(args[0], pid_x).fetch_add(1);"


@pytest.fixture
def meet(native_kernel):
    def _meet(out, wanted):
        pass

    return native_kernel(_meet, MEET)


def all_met(kernel, threads):
    kernel.device_caches.clear()  # a kernel just loaded is not known to be short, and is shared
    out = torch.zeros(2, dtype=torch.int64)
    kernel[(threads,)](out, threads)
    return out.tolist() == [threads, threads]


def test_threads_follow_torch(meet):
    for threads in (2, 4, 3, 2):
        torch.set_num_threads(threads)
        assert all_met(meet, threads)


def test_sleeping_workers_are_woken(meet):
    torch.set_num_threads(2)
    assert all_met(meet, 2)
    threading.Event().wait(0.05)  # a thousand times as long as workers stay awake
    assert all_met(meet, 2)


def test_one_thread_means_the_calling_thread(native_kernel):
    def _thread(out):
        pass

    torch.set_num_threads(1)
    out = torch.zeros(8, dtype=torch.int64)
    before = library.native().triton_cpu_shared_launches()
    body = "counter(args[0], pid_x).store(int64_t(reinterpret_cast<uintptr_t>(__builtin_thread_pointer())));"
    native_kernel(_thread, body)[(8,)](out)
    assert len(set(out.tolist())) == 1
    assert library.native().triton_cpu_shared_launches() == before


def test_short_grids_are_not_shared(native_kernel):
    def _short(out):
        pass

    torch.set_num_threads(2)
    out = torch.zeros(4, dtype=torch.int64)
    kernel = native_kernel(_short, ADD_ONE)
    for _ in range(100):
        kernel[(4,)](out)
    before = library.native().triton_cpu_shared_launches()
    for _ in range(200):
        kernel[(4,)](out)
    # Another process may have made some of them look long.
    assert library.native().triton_cpu_shared_launches() - before < 100
    assert out.tolist() == [300] * 4


def test_interpreter_is_released(native_kernel):
    def _wait(flags):
        pass

    flags = torch.zeros(3, dtype=torch.int64)
    kernel = native_kernel(_wait, WAIT_FOR_PYTHON)
    kernel.warmup(flags, grid=(1,))
    launching = threading.Thread(target=lambda: kernel[(1,)](flags))
    launching.start()
    while flags[0] == 0 and launching.is_alive():
        pass
    flags[1] = 1
    launching.join()
    assert flags.tolist() == [1, 1, 1]


def test_busy_team_does_not_hold_up_others(native_kernel):
    def _hold(flags):
        pass

    def _other(out):
        pass

    torch.set_num_threads(2)
    flags = torch.zeros(3, dtype=torch.int64)
    out = torch.zeros(64, dtype=torch.int64)
    hold, other = native_kernel(_hold, WAIT_FOR_PYTHON), native_kernel(_other, ADD_ONE)
    hold.warmup(flags, grid=(4,))
    other[(64,)](out)
    holder = threading.Thread(target=lambda: hold[(4,)](flags))
    holder.start()
    while flags[0] == 0 and holder.is_alive():
        pass
    assert holder.is_alive()
    for _ in range(50):
        other[(64,)](out)
    flags[1] = 1
    holder.join()
    assert out.tolist() == [51] * 64
    assert flags.tolist() == [4, 1, 4]


def test_many_launching_threads(native_kernel):
    def _add_one(out):
        pass

    torch.set_num_threads(3)
    kernel = native_kernel(_add_one, ADD_ONE)
    outs = [torch.zeros(size, dtype=torch.int64) for size in (3, 100, 1000, 5000)]
    kernel[(1,)](torch.zeros(1, dtype=torch.int64))

    def launch(out):
        for _ in range(300):
            kernel[(out.numel(),)](out)

    threads = [threading.Thread(target=launch, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outs:
        assert torch.equal(out, torch.full_like(out, 300))


def test_forked_child_gets_a_team_of_its_own(meet):
    torch.set_num_threads(2)
    assert all_met(meet, 2)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        os._exit(0 if all_met(meet, 2) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all_met(meet, 2)
