from vllm_triton.ops.gguf_embedding import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.gguf_embedding.op import gguf_embedding

__all__ = ["gguf_embedding"]
