import torch

from vllm_triton.ops.merge_attention_states.op import merge_attention_states
from vllm_triton.ops.merge_attention_states.reference import merge_attention_states_reference
from vllm_triton.ops.registry import TORCH_CALLS


@merge_attention_states.impl("torch", capture=TORCH_CALLS)
def merge_attention_states_torch(
    out: torch.Tensor,
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """The reference reads nothing on the host."""
    merge_attention_states_reference(out, first, first_lse, second, second_lse, lse)
