"""What the machine offers and what it prefers: the one place that knows about devices."""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
        compile_backend: what runs the pieces of a compiled forward by default (compile/pieces/compilers.py).
    """

    name: str
    device: str
    priority: tuple[str, ...]
    default_dtype: torch.dtype
    kv_cache_fraction: float
    op_priority: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compile_backend: str = "eager"

    def order(self, op: str) -> tuple[str, ...]:
        order = self.op_priority.get(op, self.priority)
        if self.device == "cpu" and triton_interprets():  # right, and thousands of times slower
            return tuple(sorted(order, key="triton".__eq__))
        return order

    def kv_cache_memory(self) -> int:
        """Bytes that the KV cache may take of what is free now."""
        free = _available_host_memory() if self.device == "cpu" else torch.cuda.mem_get_info()[0]
        return int(free * self.kv_cache_fraction)


CPU = Platform("cpu", "cpu", ("triton", "torch", "reference"), torch.bfloat16, 0.25)
_LIBRARY_FIRST = {"linear": ("torch", "triton", "reference")}
CUDA = Platform("cuda", "cuda", ("triton", "torch", "reference"), torch.bfloat16, 0.8, _LIBRARY_FIRST)
HIP = Platform("hip", "cuda", ("triton", "torch", "reference"), torch.bfloat16, 0.8, _LIBRARY_FIRST)


@functools.cache
def current_platform() -> Platform:
    """The platform of this process: a GPU where torch sees one, else the CPU."""
    if torch.cuda.is_available():
        return HIP if torch.version.hip else CUDA
    return CPU


# Of an H100 and an H200, where kernels are compiled for a GPU that is not there.
_GPU_PROCESSORS = 132


def num_processors(device: torch.device) -> int:
    """Programs that the device runs side by side: threads of a CPU, multiprocessors of a GPU."""
    if device.type == "cpu":
        return torch.get_num_threads()
    return _num_multiprocessors(device.index or 0) if torch.cuda.is_available() else _GPU_PROCESSORS


def lacks_fp8(device: str) -> bool:
    """Whether it is an NVIDIA GPU, and here, without e4m3: one before compute capability 8.9."""
    here = device == "cuda" and torch.cuda.is_available() and not torch.version.hip
    return here and torch.cuda.get_device_capability() < (8, 9)


@functools.cache
def _num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def triton_interprets() -> bool:
    """Whether @triton.jit kernels run in Triton's interpreter (TRITON_INTERPRET, read when they are decorated)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def why_not_triton(device: str) -> str | None:
    """Why Triton kernels cannot run on this kind of device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu" and not triton_interprets():
        return _why_no_cpu_backend()
    return None


def _why_no_cpu_backend() -> str | None:
    import triton
    from triton.backends import backends

    hint = "TRITON_INTERPRET=1 runs its interpreter"
    if "cpu" not in backends:
        return f"Triton knows no backend for the CPU: install vllm_triton anew, which brings one ({hint})"
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError as error:  # no driver is active
        tell = getattr(backends["cpu"].driver, "why_inactive", lambda: None)
        return f"{tell() or error} ({hint})"
    return None if target.backend == "cpu" else f"Triton runs on {target.backend} here, not on the CPU ({hint})"


def _available_host_memory(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new allocations can use without swapping, within the control group's limit."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (control_group / "memory.max").read_text().strip()
        used = int((control_group / "memory.current").read_text())
        statistics = dict(line.split() for line in (control_group / "memory.stat").read_text().splitlines())
    except OSError:  # no control group limits this process
        return available
    if limit == "max":
        return available
    # Files that were read, such as the weights, count as used until somebody needs the memory.
    cached = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
    return min(available, int(limit) - used + cached)
