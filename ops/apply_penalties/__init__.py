from vllm_triton.ops.apply_penalties import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.apply_penalties.op import apply_penalties

__all__ = ["apply_penalties"]
