from vllm_triton.ops.paged_attention import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.paged_attention.op import paged_attention

__all__ = ["paged_attention"]
