from vllm_triton.ops.scaled_mm import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.scaled_mm.op import scaled_mm

__all__ = ["scaled_mm"]
