from vllm_triton.ops.linear import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.linear.op import linear

__all__ = ["linear"]
