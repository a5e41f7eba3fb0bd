from vllm_triton.ops.merge_attention_states import kernel, vectorised  # noqa: F401  (register their implementations)
from vllm_triton.ops.merge_attention_states.op import merge_attention_states

__all__ = ["merge_attention_states"]
