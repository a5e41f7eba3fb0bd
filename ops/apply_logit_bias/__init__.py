from vllm_triton.ops.apply_logit_bias import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.apply_logit_bias.op import apply_logit_bias

__all__ = ["apply_logit_bias"]
