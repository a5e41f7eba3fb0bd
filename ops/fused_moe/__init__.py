from vllm_triton.ops.fused_moe import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.fused_moe.op import fused_moe

__all__ = ["fused_moe"]
