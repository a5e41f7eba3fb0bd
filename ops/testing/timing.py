"""How long one call takes: the median, and how far most calls lie from it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FEWEST_CALLS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: half of the calls took at most `median`, a fifth `p20`, four fifths `p80`."""

    median: float
    p20: float
    p80: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        fifths = statistics.quantiles(seconds, n=5, method="inclusive")
        return cls(statistics.median(seconds), fifths[0], fifths[3], len(seconds))


def measure(
    work: Callable[[], Any], device: str = "cpu", seconds: float = 0.2, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Calls `work` for about this long, at least FEWEST_CALLS times, after one call to warm up.

    On the CPU small operands stay in its caches from call to call; on a GPU the L2 cache is emptied between calls.

    Args:
        device: "cpu", or the device type of a GPU, whose own clock is used.
        seconds: time to spend, without the warm-up.
        clock: the CPU's clock, in seconds.
    """
    if device != "cpu":
        return _measure_gpu(work, seconds)
    work()
    taken: list[float] = []
    end = clock() + seconds
    while len(taken) < FEWEST_CALLS or clock() < end:
        start = clock()
        work()
        taken.append(clock() - start)
    return Timing.of(taken)


def _measure_gpu(work: Callable[[], Any], seconds: float) -> Timing:
    from triton.testing import do_bench

    milliseconds = do_bench(work, rep=int(seconds * 1000), return_mode="all")
    return Timing.of([one / 1000 for one in milliseconds])
