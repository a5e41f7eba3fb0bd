"""For which numbers of tokens a piece is compiled."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class CompileRange:
    """Numbers of tokens from start to end, both included."""

    start: int
    end: int

    def __contains__(self, num_tokens: int) -> bool:
        return self.start <= num_tokens <= self.end

    def __str__(self) -> str:
        return str(self.start) if self.start == self.end else f"{self.start}-{self.end}"


def compile_ranges(endpoints: Iterable[int], most: int, sizes: Iterable[int] = ()) -> list[CompileRange]:
    """The exact sizes, each a range of its own that comes before any other, then 1 to the first endpoint, and so on.

    Args:
        endpoints: last number of tokens of each range; those from `most` on change nothing.
        most: tokens in one step at most.
        sizes: exact numbers of tokens, up to `most`.
    """
    ends = [end for end in sorted(set(endpoints)) if end < most] + [most]
    starts = [1] + [end + 1 for end in ends[:-1]]
    exact = [CompileRange(size, size) for size in sorted(set(sizes)) if size <= most]
    return exact + [CompileRange(start, end) for start, end in zip(starts, ends, strict=True)]


class Ranged:
    """One callable from several, each for a range; the first that holds the number of tokens runs."""

    def __init__(self, runnables: Sequence[tuple[CompileRange, Callable[..., Any]]]):
        self._runnables = list(runnables)

    def __call__(self, num_tokens: int, *arguments: Any) -> Any:
        """Raises: ValueError for a number that is in none of the ranges."""
        for sizes, runnable in self._runnables:
            if num_tokens in sizes:
                return runnable(num_tokens, *arguments)
        known = ", ".join(str(sizes) for sizes, _ in self._runnables)
        raise ValueError(f"a piece was compiled for {known} tokens, got {num_tokens}")
