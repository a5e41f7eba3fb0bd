"""Compiling every kernel for GPUs that are not here: `python -m vllm_triton.compile.aot` prints what came out."""

from vllm_triton.compile.aot.compile import TARGETS, KernelReport, compile_case, report

__all__ = ["TARGETS", "KernelReport", "compile_case", "report"]
