"""The machine's roof, measured in the same run as what is held against it, what the machine is, and memory in use."""

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from vllm_triton.ops.testing import timing


def measure(device: str = "cpu") -> dict[str, float]:
    """roof_gb_s: bytes read per second from memory; roof_gflop_s: bfloat16 matrix product; by torch, all threads."""
    streamed = torch.ones(128 * 2**20, device=device)  # 512 MiB, far above any cache
    seconds = timing.measure(lambda: streamed.sum(), device, seconds=0.5).median
    size = 2048 if device == "cpu" else 8192
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    product_seconds = timing.measure(lambda: left @ right, device, seconds=0.5).median
    return {
        "roof_gb_s": round(streamed.numel() * streamed.element_size() / seconds / 1e9, 1),
        "roof_gflop_s": round(2 * size**3 / product_seconds / 1e9, 1),
    }


def describe_machine() -> dict[str, Any]:
    import triton

    return {
        "machine": _processor(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def resident_bytes() -> int:
    """Memory of this process that is mapped now, files included."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmRSS"].split()[0]) * 1024


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
