"""From TTIR's text to C++: `generate`."""

from vllm_triton.compile.triton_cpu.codegen.functions import generate

__all__ = ["generate"]
