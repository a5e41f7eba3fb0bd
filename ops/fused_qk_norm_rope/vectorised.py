"""Norm and rotation of query and key in torch calls, for platforms where Triton does not run."""

import torch

from vllm_triton.ops.fused_qk_norm_rope.op import fused_qk_norm_rope
from vllm_triton.ops.registry import TORCH_CALLS
from vllm_triton.ops.rms_norm.vectorised import rms_norm_torch
from vllm_triton.ops.rotary_embedding.vectorised import rotary_embedding_torch


@fused_qk_norm_rope.impl("torch", capture=TORCH_CALLS)
def fused_qk_norm_rope_torch(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = rms_norm_torch(query, query_weight, eps), rms_norm_torch(key, key_weight, eps)
    return rotary_embedding_torch(positions, *normed, cos_sin, False)
