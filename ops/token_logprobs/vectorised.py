"""In torch calls, for platforms where Triton does not run: the reference, which reads nothing on the host."""

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.token_logprobs.op import token_logprobs
from vllm_triton.ops.token_logprobs.reference import token_logprobs_reference

token_logprobs.impl("torch", capture=TORCH_CALLS)(token_logprobs_reference)
