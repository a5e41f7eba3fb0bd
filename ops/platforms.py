"""What the machine offers and what it prefers: the one place that knows about devices."""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Platform:
    """One kind of device.

    Args:
        name: "cpu", "cuda" or "hip".
        device: the torch device type.
        priority: implementations of every op, best first.
        op_priority: the same for single ops whose best differs.
        default_dtype: for checkpoints that do not say.
        kv_cache_fraction: share of the free memory, after the weights, that the KV cache takes by default.
    """

    name: str
    device: str
    priority: tuple[str, ...]
    default_dtype: torch.dtype
    kv_cache_fraction: float
    op_priority: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def order(self, op: str) -> tuple[str, ...]:
        return self.op_priority.get(op, self.priority)

    def kv_cache_memory(self) -> int:
        """Bytes that the KV cache may take of what is free now."""
        free = _available_host_memory() if self.device == "cpu" else torch.cuda.mem_get_info()[0]
        return int(free * self.kv_cache_fraction)


# On the CPU, torch's vectorised implementations serve until Triton has a backend there.
CPU = Platform("cpu", "cpu", ("torch", "triton", "reference"), torch.bfloat16, 0.25)
_LIBRARY_FIRST = {"linear": ("torch", "triton", "reference")}
CUDA = Platform("cuda", "cuda", ("triton", "torch", "reference"), torch.bfloat16, 0.8, _LIBRARY_FIRST)
HIP = Platform("hip", "cuda", ("triton", "torch", "reference"), torch.bfloat16, 0.8, _LIBRARY_FIRST)


@functools.cache
def current_platform() -> Platform:
    """The platform of this process: a GPU where torch sees one, else the CPU."""
    if torch.cuda.is_available():
        return HIP if torch.version.hip else CUDA
    return CPU


def triton_interprets() -> bool:
    """Whether @triton.jit kernels run in Triton's interpreter (TRITON_INTERPRET, read when they are decorated)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def why_not_triton(device: str) -> str | None:
    """Why Triton kernels cannot run on this kind of device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu" and not triton_interprets():
        return "Triton has no backend for the CPU here (TRITON_INTERPRET=1 runs its interpreter)"
    return None


def _available_host_memory() -> int:
    """Bytes that new allocations can use without swapping, within the control group's limit."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max") as limit_file, open("/sys/fs/cgroup/memory.current") as used_file:
            limit, used = limit_file.read().strip(), int(used_file.read())
    except OSError:  # no control group limits this process
        return available
    return available if limit == "max" else min(available, int(limit) - used)
