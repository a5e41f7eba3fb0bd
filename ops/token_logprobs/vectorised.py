import torch

from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.token_logprobs.op import token_logprobs
from vllm_triton.ops.token_logprobs.reference import token_logprobs_reference


@token_logprobs.impl("torch", capture=TORCH_CALLS)
def token_logprobs_torch(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference reads nothing on the host."""
    return token_logprobs_reference(logits, token_ids)
