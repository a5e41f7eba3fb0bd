"""Graphs that doubt themselves: every replay is compared with the same stages run uncaptured on the same inputs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from vllm_triton.compile.graphs.backend import Graph, GraphBackend, Stage, Tensors
from vllm_triton.compile.graphs.watching import ALLOCATIONS, WatchedCalls, returns_views


class GraphMismatchError(RuntimeError):
    """A replay did something else than the stages that were captured."""


class StepState(Protocol):
    """What a checked replay has to know of the steps that it compares."""

    def num_rows(self) -> int | None:
        """Rows of the results that belong to a request, where the others, padding, may hold anything."""
        ...

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """What the stages read that differs from step to step, by name."""
        ...

    def save(self) -> list[torch.Tensor]:
        """A copy of what the stages write beside their results, and may read: rows of the KV cache."""
        ...

    def restore(self, saved: list[torch.Tensor]) -> None: ...


class ResultsAlone:
    """Of stages that write nothing but their results, and whose caller knows where their inputs lie."""

    def num_rows(self) -> None:
        return None

    def inputs(self) -> dict[str, torch.Tensor]:
        return {}

    def save(self) -> list[torch.Tensor]:
        return []

    def restore(self, saved: list[torch.Tensor]) -> None:
        pass


class CheckedGraphs:
    """A backend whose graphs check themselves."""

    def __init__(self, backend: GraphBackend, state: StepState):
        self._backend = backend
        self._state = state

    @property
    def num_bytes(self) -> int:
        return self._backend.num_bytes

    def capture(self, name: str, *stages: Stage) -> tuple[Sequence["CheckedGraph"], Tensors]:
        graphs, results = self._backend.capture(name, *stages)
        return [CheckedGraph(name, graph, stages[: end + 1], self._state) for end, graph in enumerate(graphs)], results


class CheckedGraph:
    """Args: name: of the graph, for errors."""

    def __init__(self, name: str, graph: Graph, stages: Sequence[Stage], state: StepState):
        self._name = name
        self._graph = graph
        self._stages = stages
        self._state = state
        self._addresses = {input_: tensor.data_ptr() for input_, tensor in state.inputs().items()}

    @torch.inference_mode()
    def replay(self) -> Tensors:
        """Raises: GraphMismatchError, which says what differs; otherwise as the graph's own replay."""
        for input_, tensor in self._state.inputs().items():
            if tensor.data_ptr() != self._addresses[input_]:
                raise GraphMismatchError(f"graph {self._name}: {input_} has moved since it was captured")
        before = self._state.save()
        outputs = self._graph.replay()
        found, written = [output.clone() for output in outputs], self._state.save()
        self._state.restore(before)
        rows = self._state.num_rows()
        expected, observed = self._run_uncaptured()
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not observed.left_unwritten(other):
                self._compare(f"result {number}", one[:rows], other[:rows], before)
        for number, (one, other) in enumerate(zip(written, self._state.save(), strict=True)):
            self._compare(f"written state {number}", one, other, before)
        return outputs

    def _run_uncaptured(self, keeps_values: bool = False) -> tuple[Tensors, "_ObservedOps"]:
        results: Tensors = ()
        with _ObservedOps(self._name, keeps_values) as observed:
            for stage in self._stages:
                results = stage(*results)
        return results, observed

    def _compare(self, what: str, found: torch.Tensor, expected: torch.Tensor, before: list[torch.Tensor]) -> None:
        same = _same(found, expected)
        if not same.all():
            first = tuple((~same).nonzero()[0].tolist())
            raise GraphMismatchError(
                f"graph {self._name}: {what} differs from the uncaptured run at {int((~same).sum())} of {same.numel()} "
                f"places, first at {first}: {found[first].item()} instead of {expected[first].item()}; "
                f"{self._first_op(before)}"
            )

    def _first_op(self, before: list[torch.Tensor]) -> str:
        """Which op of the graph is the first that made something else, in another replay and another run."""
        if not hasattr(self._graph, "replay_by_op"):
            return "this device's graphs do not tell their ops apart"
        rows = self._state.num_rows()
        self._state.restore(before)
        replayed = [
            (op, [None if each is None else each.clone() for each in outputs])
            for op, outputs in self._graph.replay_by_op()
        ]
        self._state.restore(before)
        _, observed = self._run_uncaptured(keeps_values=True)
        for number, ((op, made), (other_op, expected)) in enumerate(zip(replayed, observed.made, strict=False)):
            pairs = zip(made, expected, strict=False)
            if op != other_op or not all(one is None or _same(one[:rows], other[:rows]).all() for one, other in pairs):
                return f"first in {op}, op {number + 1} of {len(replayed)}"
        return "in no op that torch's dispatcher sees"


class _ObservedOps(WatchedCalls):
    """Follows an uncaptured run.

    Args: keeps_values: of all that ops make, in `made`, by the ops' names.
    """

    def __init__(self, name: str, keeps_values: bool = False):
        super().__init__(name)
        self._keeps_values = keeps_values
        self._unwritten: set[int] = set()  # addresses of memory that was allocated for somebody else to write
        self._num_ops = 0
        self.made: list[tuple[str, list[torch.Tensor]]] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func in ALLOCATIONS:
            self._unwritten.add(_memory(result))
        elif not returns_views(func):
            self._written(result if isinstance(result, tuple | list) else (result,))
        return result

    def on_op(self, op: str, outputs: Tensors) -> None:
        self._num_ops += 1
        self._written(outputs)
        if self._keeps_values:
            self.made.append((op, [each.clone() for each in outputs]))

    def left_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether the run left its memory as it was allocated, as a piece does with attention's result."""
        return self._num_ops > 0 and _memory(tensor) in self._unwritten

    def _written(self, results: Sequence[Any]) -> None:
        self._unwritten.difference_update(_memory(each) for each in results if isinstance(each, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Element by element; NaN is the same as NaN."""
    return (found == expected) | (found.isnan() & expected.isnan())
