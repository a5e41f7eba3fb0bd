from vllm_triton.ops.rotary_embedding import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.rotary_embedding.op import rotary_embedding

__all__ = ["rotary_embedding"]
