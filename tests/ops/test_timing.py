import itertools

from vllm_triton.ops.testing.timing import FEWEST_CALLS, Timing, measure


def test_median_and_quantiles():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert (timing.median, timing.p20, timing.p80, timing.calls) == (3.5, 2.0, 5.0, 6)


def test_measures_each_call_until_the_time_is_spent():
    ticks = itertools.count()
    calls = []
    timing = measure(lambda: calls.append(1), seconds=30, clock=lambda: float(next(ticks)))
    assert timing.calls == len(calls) - 1  # one call warms up
    assert timing.median == timing.p20 == timing.p80 == 1.0
    # Five readings before the loop's first look at the time, then three a call.
    assert timing.calls == 12


def test_a_slow_call_is_still_measured_a_few_times():
    ticks = itertools.count(step=100)
    timing = measure(lambda: None, seconds=1, clock=lambda: float(next(ticks)))
    assert timing.calls == FEWEST_CALLS
