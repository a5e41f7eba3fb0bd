from vllm_triton.ops.layer_norm import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.layer_norm.op import layer_norm

__all__ = ["layer_norm"]
