from vllm_triton.ops.fused_qk_norm_rope import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.fused_qk_norm_rope.op import fused_qk_norm_rope

__all__ = ["fused_qk_norm_rope"]
