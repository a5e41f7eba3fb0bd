"""In torch calls, for platforms where Triton does not run: the reference, which reads nothing on the host."""

from vllm_triton.ops.merge_attention_states.op import merge_attention_states
from vllm_triton.ops.merge_attention_states.reference import merge_attention_states_reference
from vllm_triton.ops.registry import TORCH_CALLS

merge_attention_states.impl("torch", capture=TORCH_CALLS)(merge_attention_states_reference)
