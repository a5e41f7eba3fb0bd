from vllm_triton.ops.w4a16_mm import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.w4a16_mm.layout import pack
from vllm_triton.ops.w4a16_mm.op import w4a16_mm

__all__ = ["pack", "w4a16_mm"]
