import torch

from vllm_triton.ops.rms_norm.reference import rms_norm_reference
from vllm_triton.ops.rotary_embedding.reference import rotary_embedding_reference


def fused_qk_norm_rope_reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    normed = rms_norm_reference(query.to(wide), query_weight, eps), rms_norm_reference(key.to(wide), key_weight, eps)
    query_out, key_out = rotary_embedding_reference(positions, *normed, cos_sin, False)
    return query_out.to(query.dtype), key_out.to(query.dtype)
