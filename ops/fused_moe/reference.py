from collections.abc import Iterator

import torch

from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK, per_value
from vllm_triton.ops.scaled_quant.reference import PER_TENSOR, PER_TOKEN, scaled_quant_reference
from vllm_triton.ops.silu_and_mul.reference import silu_and_mul_reference

# Of gpt-oss: how steep the sigmoid is.
SWIGLU_ALPHA = 1.702


def fused_moe_reference(
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
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=wide)
    for place, tokens, choices in present_experts(topk_ids, expert_map):
        gate_up = product_reference(x[tokens], w1, place, w1_bias, w1_scale, a1_scale, num_parts=2)
        activation = swiglu_reference(gate_up, swiglu_limit).to(x.dtype)
        result = product_reference(activation, w2, place, w2_bias, w2_scale, a2_scale)
        result = result * topk_weights[tokens, choices, None].to(wide)
        out.index_add_(0, tokens, result.to(x.dtype).to(wide))
    return out.to(x.dtype)


def present_experts(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of each that is here and was chosen: where it lies, which tokens chose it, and as which of their choices."""
    for expert in topk_ids.unique().tolist():
        place = -1 if expert < 0 else expert if expert_map is None else int(expert_map[expert])
        if place >= 0:
            yield place, *(topk_ids == expert).nonzero(as_tuple=True)


def product_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    place: int,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    num_parts: int = 1,
) -> torch.Tensor:
    """x [n, K] by the expert's weight [N, K]: [n, N] in float32 or wider.

    Args: num_parts: of the weight, of which each begins blocks of its own.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = weight[place].to(wide)
    if scale is None:
        x = x.to(wide)
    else:
        values, scales = scaled_quant_reference(
            x, quantized_dtype(weight), scale_group(weight, scale, a_scale), a_scale
        )
        x = values.to(wide) * per_value(scales, x.shape).to(wide)
        shape = torch.Size((len(matrix) // num_parts, matrix.shape[1]))
        parts = [per_value(part, shape).to(wide) for part in scale[place].chunk(num_parts)]
        matrix = matrix * torch.cat([part.expand(shape[0], -1) for part in parts])
    out = x @ matrix.T
    return out if bias is None else out + bias[place].to(wide)


def has_blocks(weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether scales of a weight [X, N, K] are of blocks, not of its rows."""
    return scale is not None and scale.shape[1:] != (weight.shape[1], 1)


def scale_group(weight: torch.Tensor, scale: torch.Tensor, a_scale: torch.Tensor | None) -> int:
    """How `scaled_quant` groups what meets a weight [X, N, K] with such scales."""
    if a_scale is not None:
        return PER_TENSOR
    return SCALE_BLOCK if has_blocks(weight, scale) else PER_TOKEN


def quantized_dtype(weight: torch.Tensor) -> torch.dtype:
    """That of the weight, also where comparisons hold fp8 in a wider type."""
    return torch.int8 if weight.dtype == torch.int8 else torch.float8_e4m3fn


def swiglu_reference(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """[..., 2*I] -> [..., I]: silu_and_mul, or with a limit the activation of gpt-oss."""
    if limit == 0:
        return silu_and_mul_reference(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
