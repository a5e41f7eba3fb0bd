from vllm_triton.ops.sample_tokens import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.sample_tokens.op import sample_tokens

__all__ = ["sample_tokens"]
