"""The CPU's graphs: lists of Triton launches, which replay without Python.

While a region is recorded its launches are written down and do not run, so nothing else in it may run either: a torch
call would read what was never computed, and would be missing from every replay. Allocations are served from an arena,
views are free, and everything else stops the recording with the call and its line.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_triton.compile.graphs.arena import Arena
from vllm_triton.compile.graphs.backend import Stage, Tensors
from vllm_triton.compile.graphs.watching import WatchedCalls, calling_line
from vllm_triton.compile.triton_cpu.errors import RecordingError
from vllm_triton.compile.triton_cpu.launching import LaunchList, recording

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class CpuGraph:
    """What one or more stages launched."""

    def __init__(self, launches: LaunchList, outputs: Tensors, arena: Arena):
        self._launches = launches
        self._outputs = outputs
        self._arena = arena  # which the launches' addresses lie in

    def __len__(self) -> int:
        return len(self._launches)

    def replay(self) -> Tensors:
        """Raises: KernelError where a kernel reports a failure."""
        self._launches.replay()
        return self._outputs


class CpuGraphs:
    """Records regions; all graphs share one arena."""

    def __init__(self) -> None:
        self._arena = Arena()

    @property
    def num_bytes(self) -> int:
        """What the graphs' memory takes, beside the lists themselves."""
        return self._arena.num_bytes

    def capture(self, name: str, *stages: Stage) -> list[CpuGraph]:
        """Records what the stages launch, without running it. Kernels that are missing are compiled.

        Raises: RecordingError, which names the call that is no launch.
        """
        lists: list[LaunchList] = []
        outputs: list[Tensors] = []  # held until the end, so that no stage overwrites what one before it returned
        for stage in stages:
            launches = LaunchList()
            if lists:
                launches.extend(lists[-1])
            with recording(launches), _LaunchesAlone(self._arena, name):
                outputs.append(stage(*outputs[-1]) if outputs else stage())
            lists.append(launches)
        return [
            CpuGraph(launches, tuple(map(self._arena.unowned, results)), self._arena)
            for launches, results in zip(lists, outputs, strict=True)
        ]


class _LaunchesAlone(WatchedCalls):
    def __init__(self, arena: Arena, name: str):
        super().__init__(name)
        self._arena = arena

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in _ALLOCATIONS:
            shape = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
            return self._arena.empty(shape.shape, shape.stride(), shape.dtype)
        returns = func._schema.returns
        if returns and all(each.alias_info is not None and not each.alias_info.is_write for each in returns):
            return func(*args, **kwargs)
        raise RecordingError(
            f"graph {self.name}: {func} is no Triton launch and cannot be captured on a CPU: call it before or after "
            f"what is captured, or make it part of an op's kernel ({calling_line()})"
        )
