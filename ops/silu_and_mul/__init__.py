from vllm_triton.ops.silu_and_mul import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.silu_and_mul.op import silu_and_mul

__all__ = ["silu_and_mul"]
