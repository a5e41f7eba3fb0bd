"""vllm_triton: an LLM inference and serving engine in Python and Triton alone.

Names load on first use, so that `import vllm_triton` and `import vllm_triton.ops` stay light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_triton.llm import LLM
    from vllm_triton.outputs import CompletionOutput, RequestOutput
    from vllm_triton.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "vllm_triton.llm",
    "CompletionOutput": "vllm_triton.outputs",
    "RequestOutput": "vllm_triton.outputs",
    "SamplingParams": "vllm_triton.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'vllm_triton' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
