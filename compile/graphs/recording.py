"""The CPU's graphs: lists of Triton launches, which replay without Python.

While a region is recorded its launches are written down and do not run, so nothing else in it may run either: a torch
call would read what was never computed, and would be missing from every replay. Allocations are served from an arena,
views are free, and everything else stops the recording with the call and its line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_triton.compile.graphs.arena import Arena
from vllm_triton.compile.graphs.backend import CaptureError, Stage, Tensors
from vllm_triton.compile.graphs.watching import ALLOCATIONS, WatchedCalls, calling_line, returns_views
from vllm_triton.compile.triton_cpu.launching import LaunchList, recording


@dataclass(frozen=True)
class _OpCall:
    """An op that was called while a graph was recorded.

    end: number of launches when it had returned.
    outputs: what it returned or wrote; None in place of what lies outside of the arena, such as a KV cache.
    """

    op: str
    end: int
    outputs: tuple[torch.Tensor | None, ...]


class CpuGraph:
    """What one or more stages launched."""

    def __init__(self, launches: LaunchList, outputs: Tensors, arena: Arena, calls: Sequence[_OpCall]):
        self._launches = launches
        self._outputs = outputs
        self._arena = arena  # which the launches' addresses lie in
        self._calls = tuple(calls)

    def __len__(self) -> int:
        return len(self._launches)

    def replay(self) -> Tensors:
        """Raises: KernelError where a kernel reports a failure."""
        self._launches.replay()
        return self._outputs

    def replay_by_op(self) -> Iterator[tuple[str, tuple[torch.Tensor | None, ...]]]:
        """Replays in steps of one op: its name, and what it has then made. Only ops that went through torch's
        dispatcher are known; those in between run with the next.
        """
        start = 0
        for call in self._calls:
            launches = LaunchList()
            launches.extend(self._launches, start, call.end)
            launches.replay()
            start = call.end
            yield call.op, call.outputs


class CpuGraphs:
    """Records regions; all graphs share one arena."""

    def __init__(self) -> None:
        self._arena = Arena()

    @property
    def num_bytes(self) -> int:
        """What the graphs' memory takes, beside the lists themselves."""
        return self._arena.num_bytes

    def capture(self, name: str, *stages: Stage) -> tuple[list[CpuGraph], Tensors]:
        """Records what the stages launch, without running it. Kernels that are missing are compiled.

        Raises: CaptureError, which names the call that is no launch.
        """
        lists: list[LaunchList] = []
        calls: list[_OpCall] = []
        counts: list[int] = []  # of calls, at the end of each stage
        outputs: list[Tensors] = []  # held until the end, so that no stage overwrites what one before it returned
        for stage in stages:
            launches = LaunchList()
            if lists:
                launches.extend(lists[-1])
            with recording(launches), _LaunchesAlone(self._arena, name, launches, calls):
                outputs.append(stage(*outputs[-1]) if outputs else stage())
            lists.append(launches)
            counts.append(len(calls))
        graphs = [
            CpuGraph(launches, tuple(map(self._arena.unowned, results)), self._arena, calls[:count])
            for launches, results, count in zip(lists, outputs, counts, strict=True)
        ]
        return graphs, outputs[-1]


class _LaunchesAlone(WatchedCalls):
    def __init__(self, arena: Arena, name: str, launches: LaunchList, calls: list[_OpCall]):
        super().__init__(name)
        self._arena = arena
        self._launches = launches
        self._calls = calls

    def on_op(self, op: str, outputs: Tensors) -> None:
        places = tuple(self._arena.unowned(each) if self._arena.holds(each) else None for each in outputs)
        self._calls.append(_OpCall(op, len(self._launches), places))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in ALLOCATIONS:
            shape = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
            return self._arena.empty(shape.shape, shape.stride(), shape.dtype)
        if returns_views(func):
            return func(*args, **kwargs)
        raise CaptureError(
            f"graph {self.name}: {func} is no Triton launch and cannot be captured on a CPU: call it before or after "
            f"what is captured, or make it part of an op's kernel ({calling_line()})"
        )
