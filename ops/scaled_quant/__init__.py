from vllm_triton.ops.scaled_quant import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.scaled_quant.op import PER_TENSOR, PER_TOKEN, scaled_quant

__all__ = ["PER_TENSOR", "PER_TOKEN", "scaled_quant"]
