"""Norm and rotation of query and key heads, one program a token: a head is loaded once, as the two halves that turn.

    n = x * rsqrt(mean x^2 + eps) * weight;  y[a] = n[a] * cos - n[b] * sin;  y[b] = n[b] * cos + n[a] * sin

float32 between load and store. The kernel is that of rotary_embedding, given weights.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4; Su et al., "RoFormer: Enhanced
Transformer with Rotary Position Embedding", equation 34.
"""

import torch

from vllm_triton.ops.fused_qk_norm_rope.op import fused_qk_norm_rope
from vllm_triton.ops.launch import supports_triton
from vllm_triton.ops.rotary_embedding.kernel import compile_case, launch_turned

COMPILE_CASES = [compile_case(16, 8, rotary, interleaved=False, has_norm=True) for rotary in (128, 96)]


@fused_qk_norm_rope.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_fused_qk_norm_rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_turned(positions, query, key, query_weight, key_weight, cos_sin, eps, False)
