from vllm_triton.ops.topk_routing import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.topk_routing.op import topk_routing

__all__ = ["topk_routing"]
