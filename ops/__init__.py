"""The ops of the engine. Import it as `vllm_triton.ops`; importing it defines every op and registers our kernels."""

if __name__ != "vllm_triton.ops":
    raise ImportError(
        f"import this package as 'vllm_triton.ops', not as {__name__!r}: it would register every op twice"
    )

from vllm_triton.ops.rms_norm import rms_norm

__all__ = ["rms_norm"]
