from vllm_triton.ops.token_logprobs import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.token_logprobs.op import token_logprobs

__all__ = ["token_logprobs"]
