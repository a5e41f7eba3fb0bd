"""Graphs that doubt themselves: every replay is compared with the same stages run uncaptured on the same inputs."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from vllm_triton.compile.graphs.backend import Graph, GraphBackend, Stage, Tensors


class GraphMismatchError(RuntimeError):
    """A replay did something else than the stages that were captured."""


class StepState(Protocol):
    """What a checked replay has to know of the steps that it compares."""

    def num_rows(self) -> int:
        """Rows of the results that belong to a request; the others, padding, may hold anything."""
        ...

    def inputs(self) -> Mapping[str, torch.Tensor]:
        """What the stages read that differs from step to step, by name."""
        ...

    def save(self) -> list[torch.Tensor]:
        """A copy of what the stages write beside their results, and may read: rows of the KV cache."""
        ...

    def restore(self, saved: list[torch.Tensor]) -> None: ...


class CheckedGraphs:
    """A backend whose graphs check themselves."""

    def __init__(self, backend: GraphBackend, state: StepState):
        self._backend = backend
        self._state = state

    @property
    def num_bytes(self) -> int:
        return self._backend.num_bytes

    def capture(self, name: str, *stages: Stage) -> Sequence["CheckedGraph"]:
        graphs = self._backend.capture(name, *stages)
        return [CheckedGraph(name, graph, stages[: end + 1], self._state) for end, graph in enumerate(graphs)]


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
        expected: Tensors = ()
        for stage in self._stages:
            expected = stage(*expected)
        rows = self._state.num_rows()
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            self._compare(f"result {number}", one[:rows], other[:rows])
        for number, (one, other) in enumerate(zip(written, self._state.save(), strict=True)):
            self._compare(f"written state {number}", one, other)
        return tuple(found)

    def _compare(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        same = (found == expected) | (found.isnan() & expected.isnan())
        if not same.all():
            first = tuple((~same).nonzero()[0].tolist())
            raise GraphMismatchError(
                f"graph {self._name}: {what} differs from the uncaptured run at {int((~same).sum())} of {same.numel()} "
                f"places, first at {first}: {found[first].item()} instead of {expected[first].item()}"
            )
