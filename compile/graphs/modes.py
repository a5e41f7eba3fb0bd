"""What may be captured, and what a step runs as.

A captured graph holds one shape: a step is padded to the nearest one, or runs as it is where there is none.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes a second to import, and the command line's --help needs the modes alone
    from vllm_triton.compile.graphs.backend import GraphBackend


class CudagraphMode(enum.Enum):
    """Which graphs exist, by vLLM's names; "cuda" is history, the CPU's launch lists count as well.

    PIECEWISE: what lies between the attention ops, for any step. FULL: whole steps. FULL_AND_PIECEWISE: whole steps of
    one token a request, pieces for all others.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_AND_PIECEWISE = "full_and_piecewise"

    @property
    def has_pieces(self) -> bool:
        return self in (CudagraphMode.PIECEWISE, CudagraphMode.FULL_AND_PIECEWISE)

    @property
    def has_full(self) -> bool:
        return self in (CudagraphMode.FULL, CudagraphMode.FULL_AND_PIECEWISE)


class RuntimeMode(enum.Enum):
    """What one step runs as."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True)
class BatchDescriptor:
    """The shape of a step, as graphs tell them apart.

    num_reqs: None where the graph does not depend on it, as pieces without attention do not.
    uniform: every request has one token.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False


@dataclass(frozen=True)
class Dispatch:
    """What a step runs as; the descriptor of its graph, to which it is padded, or of the step itself without one.

    captures_into: where the step's graphs are still to be captured, the backend that does it.
    """

    mode: RuntimeMode
    descriptor: BatchDescriptor
    captures_into: "GraphBackend | None" = None


class Dispatcher:
    """Finds the graph of a step: FULL before PIECEWISE before none; it never fails.

    Args:
        sizes: that were captured, for each mode.
    """

    def __init__(self, sizes: Mapping[RuntimeMode, Iterable[int]]):
        self._sizes = {mode: sorted(each) for mode, each in sizes.items()}
        self._full = {size: _full(size) for size in self._sizes.get(RuntimeMode.FULL, ())}

    def dispatch(self, num_tokens: int, num_reqs: int, uniform: bool, allow_full: bool = True) -> Dispatch:
        """Args: allow_full: False where something in the step needs to run between its ops."""
        if uniform and allow_full:
            size = self._size(RuntimeMode.FULL, num_tokens)
            if size is not None:
                return self._full[size]
        size = self._size(RuntimeMode.PIECEWISE, num_tokens)
        if size is not None:
            return Dispatch(RuntimeMode.PIECEWISE, BatchDescriptor(size))
        return Dispatch(RuntimeMode.NONE, BatchDescriptor(num_tokens, num_reqs, uniform))

    def _size(self, mode: RuntimeMode, num_tokens: int) -> int | None:
        return next((size for size in self._sizes.get(mode, ()) if size >= num_tokens), None)


def _full(size: int) -> Dispatch:
    return Dispatch(RuntimeMode.FULL, BatchDescriptor(size, size, uniform=True))


def default_capture_sizes(most: int) -> list[int]:
    """1, 2, 4 and the multiples of 8 up to `most` requests, at most 512, and `most` itself."""
    most = min(most, 512)
    return sorted({size for size in (1, 2, 4, *range(8, most + 1, 8)) if size <= most} | {most})
