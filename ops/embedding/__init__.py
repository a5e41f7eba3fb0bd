from vllm_triton.ops.embedding import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.embedding.op import embedding

__all__ = ["embedding"]
