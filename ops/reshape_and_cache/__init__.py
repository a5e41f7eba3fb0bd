from vllm_triton.ops.reshape_and_cache import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.reshape_and_cache.op import reshape_and_cache

__all__ = ["reshape_and_cache"]
