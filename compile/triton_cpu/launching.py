"""Launches and lists of launches, as Python sees them.

A launch list is to the CPU what a CUDA graph is to a GPU: while it records, the launches of one thread are written down
instead of run; a replay runs them all in one native call, in order, over one thread team.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import NoReturn

from vllm_triton.compile.triton_cpu.errors import KernelAssertionError, KernelError, OutOfBoundsError, RecordingError
from vllm_triton.compile.triton_cpu.library import Report, native

# `Failure` of runtime/report.h.
_FAILURES: dict[int, type[KernelError]] = {1: KernelAssertionError, 2: OutOfBoundsError}


def num_threads() -> int:
    """Threads that a launch may take, the launching one among them: torch's setting."""
    import torch

    return torch.get_num_threads()


def fail(kind: int, text: str) -> NoReturn:
    """Raises what a kernel reported: the KernelError of that kind."""
    raise _FAILURES[kind](text)


def fail_by(report: Report) -> NoReturn:
    """Raises what a launch left in its report."""
    fail(report.kind, report.text.decode(errors="replace"))


class LaunchList:
    """Kernels, their arguments as packed when they were appended, and grids.

    The list keeps its kernels loaded. It holds addresses, not tensors: whoever records keeps the memory alive and in
    place until the last replay. Replays may run in several threads; appending during a replay is the caller's fault.
    """

    def __init__(self) -> None:
        self._native = native()
        self.handle: int = self._native.triton_cpu_list_new()

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle:
            self._native.triton_cpu_list_delete(handle)

    def __len__(self) -> int:
        return self._native.triton_cpu_list_length(self.handle)

    def append(self, function: int, slots: Sequence[int], grid: Sequence[int]) -> None:
        """Adds a launch; one of an empty grid is left out.

        Args:
            function: a loaded kernel, `CompiledKernel.function`.
            slots: one 8-byte unsigned value for each argument that is not constexpr (addresses, integers in two's
                complement, the bits of floats).
            grid: three sizes.
        """
        x, y, z = grid
        packed = (ctypes.c_uint64 * len(slots))(*slots)
        self._native.triton_cpu_list_append(self.handle, function, packed, len(slots), x, y, z)

    def extend(self, other: "LaunchList", first: int = 0, last: int | None = None) -> None:
        """Adds the launches of another list behind its own: all, or those from `first` up to `last`."""
        self._native.triton_cpu_list_extend(self.handle, other.handle, first, len(other) if last is None else last)

    def replay(self) -> None:
        """Runs every launch, each after the one before it has ended; none after one that fails.

        Raises: RecordingError while this thread records; KernelError where a kernel reports a failure.
        """
        refuse_while_recording("replay a launch list")
        report = Report()
        if self._native.triton_cpu_list_replay(self.handle, num_threads(), report):
            fail_by(report)


@contextlib.contextmanager
def recording(launch_list: LaunchList) -> Iterator[LaunchList]:
    """Appends this thread's launches to the list instead of running them.

    Raises: RecordingError where this thread records already.
    """
    refuse_while_recording("start a recording")
    library = native()
    library.triton_cpu_record(launch_list.handle)
    try:
        yield launch_list
    finally:
        library.triton_cpu_record(None)


def is_recording() -> bool:
    """Whether this thread's launches are being recorded."""
    return bool(native().triton_cpu_recorder())


def refuse_while_recording(action: str) -> None:
    """Raises: RecordingError while this thread records."""
    if is_recording():
        raise RecordingError(f"cannot {action} while this thread's launches are being recorded")
