"""Where the time of a decode step goes: bound methods of an engine, timed while it generates.

Parts, each without what another one counts:
    scheduler  Scheduler.schedule
    inputs     the persistent batch and the model's inputs, on the host
    replay     the captured graph: the model, and the draw of plain requests
    sampling   what else the runner does: the draw's arguments, tokens back to Python
    update     Scheduler.update_from_output
    outputs    OutputProcessor.process: text, stop strings, finished requests
    rest       the loops around them: EngineCore.step, LLM.generate
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

REST = "rest"
PARTS = ("scheduler", "inputs", "replay", "sampling", "update", "outputs", REST)
# Milliseconds of a step outside the replay, by requests in it.
PYTHON_LIMITS_MS = {1: 0.4, 64: 3.0}
NUM_WARMUP_STEPS = 4


@dataclass
class Step:
    """One turn of the engine's loop: seconds of it all and of each part, and the requests that got a token."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    num_calls: int = 0
    num_outputs: int = 0

    @property
    def python_seconds(self) -> float:
        """What is no replay."""
        return self.seconds - self.parts.get("replay", 0.0)

    @property
    def rest_seconds(self) -> float:
        """What no part counts."""
        return self.seconds - sum(self.parts.values())


class StepClock:
    """Splits the time from step to step. Of calls within one another, each counts without the inner ones.

    Args: clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.steps: list[Step] = []  # those that have ended
        self._clock = clock
        self._step = Step()
        self._start: float | None = None
        self._inner = [0.0]  # seconds of the calls within each one that runs

    def start_step(self) -> Step:
        """Ends the step before, if there is one."""
        now = self._clock()
        if self._start is not None:
            self._step.seconds = now - self._start
            self.steps.append(self._step)
        self._start, self._step = now, Step()
        return self._step

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = self._clock()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                taken = self._clock() - start
                parts = self._step.parts
                parts[part] = parts.get(part, 0.0) + taken - self._inner.pop()
                self._inner[-1] += taken
                self._step.num_calls += 1

        return call

    def stepping(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """The engine core's step, which starts one here."""

        def call() -> Any:
            current = self.start_step()
            done = step()
            current.num_outputs = len(done.outputs)
            return done

        return call


@contextmanager
def step_times(llm: Any) -> Iterator[StepClock]:
    """Times an LLM's steps for as long as it lasts.

    Raises: AttributeError for a method that the engine has no more: name what does its work in `timed` below.
    """
    from vllm_triton.compile.graphs.recording import CpuGraph

    clock, core = StepClock(), llm.core
    timed = [
        ("scheduler", core.scheduler, "schedule"),
        ("inputs", core.runner.batch, "apply"),
        ("inputs", core.runner, "_prepare"),
        ("replay", CpuGraph, "replay"),
        ("sampling", core.runner, "execute"),
        ("update", core.scheduler, "update_from_output"),
        ("outputs", llm.processor, "process"),
    ]
    with ExitStack() as stack:
        for part, owner, name in timed:
            stack.enter_context(mock.patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        stack.enter_context(mock.patch.object(core, "step", clock.stepping(core.step)))
        yield clock


def decode_steps(steps: Sequence[Step], num_requests: int) -> list[Step]:
    """The steps in which so many requests decode by a graph, without the first ones.

    Raises: SystemExit where there is none.
    """
    decoding = [step for step in steps if step.num_outputs == num_requests and "replay" in step.parts]
    if len(decoding) <= NUM_WARMUP_STEPS:
        raise SystemExit(
            f"{len(decoding)} steps replayed a graph for {num_requests} requests, and the first {NUM_WARMUP_STEPS} do "
            "not count: the engine's log says what it captured and why it captured nothing"
        )
    return decoding[NUM_WARMUP_STEPS:]


def summarise(steps: Sequence[Step]) -> dict[str, Any]:
    """Medians over steps, in milliseconds: of the step, of its parts, and of all that is not the replay."""

    def median(values: Iterator[float]) -> float:
        return round(1000 * statistics.median(values), 4)

    parts = {part: median(step.parts.get(part, 0.0) for step in steps) for part in PARTS if part != REST}
    return {
        "steps": len(steps),
        "step_ms": median(step.seconds for step in steps),
        "python_ms": median(step.python_seconds for step in steps),
        "parts_ms": parts | {REST: median(step.rest_seconds for step in steps)},
        "timing_ms": round(1000 * statistics.median(step.num_calls for step in steps) * call_overhead(), 4),
    }


def call_overhead(num_calls: int = 20000) -> float:
    """Seconds that timing adds to one call."""

    def seconds(function: Callable[[], None]) -> float:
        start = time.perf_counter()
        for _ in range(num_calls):
            function()
        return time.perf_counter() - start

    def nothing() -> None:
        pass

    timed = StepClock().timed("nothing", nothing)
    return max(min(seconds(timed) for _ in range(5)) - min(seconds(nothing) for _ in range(5)), 0.0) / num_calls


def table(num_requests: int, figures: dict[str, Any]) -> list[str]:
    """Lines for people: each part in milliseconds and per cent of the step."""
    step, python, limit = figures["step_ms"], figures["python_ms"], PYTHON_LIMITS_MS.get(num_requests)
    steps, timing = figures["steps"], figures["timing_ms"]
    lines = [f"batch {num_requests}: medians of {steps} decode steps; timing them adds {timing:.3f} ms to each"]
    rows = {**figures["parts_ms"], "step": step, "python": python}
    lines += [f"{name:>12} {ms:>9.3f} ms {100 * ms / step:>6.1f} %" for name, ms in rows.items()]
    if limit is not None:
        lines[-1] += f"   {'within' if python < limit else 'OVER'} the limit of {limit} ms"
    return lines
