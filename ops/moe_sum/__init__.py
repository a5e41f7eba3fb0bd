from vllm_triton.ops.moe_sum import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.moe_sum.op import moe_sum

__all__ = ["moe_sum"]
