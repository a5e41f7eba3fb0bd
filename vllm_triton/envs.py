"""The one file that reads the environment."""

import os
from pathlib import Path


def kernels() -> str:
    """VLLM_TRITON_KERNELS: implementations by op, "linear=torch,rms_norm=mine"; a setting in code or flag wins."""
    return os.environ.get("VLLM_TRITON_KERNELS", "")


def graph_check() -> bool:
    """VLLM_TRITON_GRAPH_CHECK: 1 compares every replay of a graph with the same work uncaptured; slow."""
    return os.environ.get("VLLM_TRITON_GRAPH_CHECK", "0") not in ("", "0")


def log_level() -> str:
    """VLLM_TRITON_LOG_LEVEL: DEBUG, INFO (default), WARNING or ERROR."""
    return os.environ.get("VLLM_TRITON_LOG_LEVEL", "INFO").upper()


def cache_folder() -> Path:
    """VLLM_TRITON_CACHE: where compiled forwards are kept; by default a folder in the user's cache."""
    given = os.environ.get("VLLM_TRITON_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_triton"
