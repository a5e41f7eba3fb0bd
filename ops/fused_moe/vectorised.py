"""The experts one after another, by torch's own products; the host reads which of them have tokens."""

from collections.abc import Iterator

import torch

from vllm_triton.ops.fused_moe.op import fused_moe
from vllm_triton.ops.fused_moe.reference import SWIGLU_ALPHA, scale_group
from vllm_triton.ops.registry import HOST_READS
from vllm_triton.ops.scaled_mm.vectorised import scaled_mm_torch
from vllm_triton.ops.scaled_quant.vectorised import scaled_quant_torch


@fused_moe.impl("torch", capture=HOST_READS)
def fused_moe_torch(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    for place, tokens, slots in chosen_experts(topk_ids, expert_map, w1.shape[0]):
        gate, up = _product(x[tokens], w1, place, w1_bias, w1_scale, a1_scale, num_parts=2)
        activation = _swiglu(gate, up, swiglu_limit).to(x.dtype)
        (result,) = _product(activation, w2, place, w2_bias, w2_scale, a2_scale, num_parts=1)
        out.index_add_(0, tokens, result * topk_weights.flatten()[slots, None])
    return out.to(x.dtype)


def chosen_experts(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of each that is here and was chosen: where it lies, its slots' tokens, and the slots."""
    places = topk_ids.long()
    if expert_map is not None:
        places = torch.where(places < 0, -1, expert_map[places.clamp(min=0)])
    order = places.flatten().argsort(stable=True)
    counts = torch.bincount(places.flatten() + 1, minlength=num_experts + 1).tolist()
    for place, slots in enumerate(order.split(counts), start=-1):
        if place >= 0 and len(slots):
            yield place, slots // topk_ids.shape[1], slots


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    place: int,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    num_parts: int,
) -> tuple[torch.Tensor, ...]:
    """x [n, K] by the expert's weight, part by part; in float32 where the weight has scales."""
    expert_bias = None if bias is None else bias[place]
    if scale is None:
        return torch.nn.functional.linear(x, weight[place], expert_bias).chunk(num_parts, dim=-1)
    values, scales = scaled_quant_torch(x, weight.dtype, scale_group(weight, scale, a_scale), a_scale)
    parts = zip(
        weight[place].chunk(num_parts),
        scale[place].chunk(num_parts),
        [None] * num_parts if expert_bias is None else expert_bias.chunk(num_parts),
        strict=True,
    )
    return tuple(scaled_mm_torch(values, part, scales, of_part, torch.float32, b) for part, of_part, b in parts)


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    if limit == 0:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
