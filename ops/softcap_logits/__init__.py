from vllm_triton.ops.softcap_logits import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.softcap_logits.op import softcap_logits

__all__ = ["softcap_logits"]
