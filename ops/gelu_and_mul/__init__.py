from vllm_triton.ops.gelu_and_mul import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.gelu_and_mul.op import gelu_and_mul

__all__ = ["gelu_and_mul"]
