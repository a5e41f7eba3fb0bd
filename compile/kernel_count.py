"""How many kernels Triton has made ready in this process: compiled, or found in its own cache on disk.

Each takes milliseconds at least, during which a server answers nobody: after its warm-up the number must stay.
"""

from typing import Any

import triton


class _Count:
    def __init__(self) -> None:
        self.number = 0
        self.latest: list[str] = []
        self._next: Any = None

    def install(self) -> None:
        """Counts from now on; a hook that was there before is still called."""
        self._next = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self

    def __call__(self, **arguments: Any) -> Any:
        self.number += 1
        self.latest = [*self.latest[-9:], arguments["repr"]]
        return self._next(**arguments) if self._next else None


_count = _Count()
_count.install()


def kernels_compiled() -> int:
    """Since this module was imported."""
    return _count.number


def latest_kernels() -> list[str]:
    """The ten latest, oldest first, as Triton describes them: name, options and types."""
    return list(_count.latest)
