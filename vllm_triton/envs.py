"""The one file that reads the environment."""

import os


def kernels() -> str:
    """VLLM_TRITON_KERNELS: implementations by op, "linear=torch,rms_norm=mine"; a setting in code or flag wins."""
    return os.environ.get("VLLM_TRITON_KERNELS", "")


def graph_check() -> bool:
    """VLLM_TRITON_GRAPH_CHECK: 1 compares every replay of a graph with the same work uncaptured; slow."""
    return os.environ.get("VLLM_TRITON_GRAPH_CHECK", "0") not in ("", "0")


def log_level() -> str:
    """VLLM_TRITON_LOG_LEVEL: DEBUG, INFO (default), WARNING or ERROR."""
    return os.environ.get("VLLM_TRITON_LOG_LEVEL", "INFO").upper()
