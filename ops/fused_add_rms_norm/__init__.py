from vllm_triton.ops.fused_add_rms_norm import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.fused_add_rms_norm.op import fused_add_rms_norm

__all__ = ["fused_add_rms_norm"]
