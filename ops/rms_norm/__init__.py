from vllm_triton.ops.rms_norm import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
