"""The CPU as Triton's benchmarks see a device: a clock, and a cache to empty between runs."""

import time
from pathlib import Path
from typing import Any

from vllm_triton.compile.triton_cpu.launching import refuse_while_recording

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE_BYTES = 32 * 2**20
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Event:
    """A point in time, as `torch.cuda.Event` has them; launches have ended when they return, so any clock will do."""

    def __init__(self, enable_timing: bool = True) -> None:
        self._seconds: float | None = None

    def record(self) -> None:
        refuse_while_recording("time a launch")
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        synchronize()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`. Raises: ValueError where one of them was not recorded."""
        if self._seconds is None or end._seconds is None:
            raise ValueError("both events must be recorded before the time between them can be told")
        # A step of the clock is the least that can be told apart; Triton divides by what it gets.
        return max((end._seconds - self._seconds) * 1e3, 1e-6)


def synchronize(device: Any = None) -> None:
    """Nothing to wait for. Raises: RecordingError while this thread records, as its launches have not run."""
    refuse_while_recording("wait for launches")


def current_device() -> int:
    return 0


def cache_buffer() -> Any:
    """A tensor twice the size of the last-level cache: writing it leaves nothing else there."""
    import torch

    return torch.empty(2 * last_level_cache_bytes(), dtype=torch.int8)


def last_level_cache_bytes() -> int:
    """Size of the largest cache that the first core reaches, 32 MiB where the system does not tell."""
    sizes = [_parse(path.read_text()) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_CACHE_BYTES)


def _parse(size: str) -> int:
    text = size.strip()
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)
