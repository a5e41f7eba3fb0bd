from vllm_triton.ops.rejection_sample import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.rejection_sample.op import rejection_sample

__all__ = ["rejection_sample"]
