from vllm_triton.ops.apply_token_bitmask import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.apply_token_bitmask.op import apply_token_bitmask

__all__ = ["apply_token_bitmask"]
