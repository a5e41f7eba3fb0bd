from vllm_triton.ops.fused_moe_w4a16 import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.fused_moe_w4a16.op import fused_moe_w4a16

__all__ = ["fused_moe_w4a16"]
