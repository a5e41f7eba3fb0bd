"""What every kind of graph offers: the CPU's lists of launches (recording.py), and a GPU's graphs."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Tensors = tuple[torch.Tensor, ...]
Stage = Callable[..., Tensors]


class CaptureError(RuntimeError):
    """A region cannot be captured: names the graph, the call and the line."""


class Graph(Protocol):
    """Work that was captured once, with its addresses, and runs again as often as asked."""

    def replay(self) -> Tensors:
        """Runs it; returns what its last stage returned, valid until the next replay of a graph of its backend."""
        ...


class GraphBackend(Protocol):
    """Captures work into memory that all its graphs share, so that one of them runs at a time."""

    @property
    def num_bytes(self) -> int:
        """What that memory takes."""
        ...

    def capture(self, name: str, *stages: Stage) -> tuple[Sequence[Graph], Tensors]:
        """Captures what stages do to fixed addresses. Kernels that are missing are compiled.

        Args:
            name: for errors.
            stages: each takes what the one before it returned; the first takes nothing.
        Returns: a graph of the first stage, one of the first two, and so on; and what the last stage returned, whose
            memory the next capture may take for other things once these tensors are gone.
        Raises: CaptureError, which names what cannot be captured.
        """
        ...
