"""Inputs for the property tests and benchmarks of fused_moe: experts, choices, quantised weights, and tokens whose
results depend on no implementation's last bit.
"""

from typing import Any

import torch

from vllm_triton.ops.contract import QUANTIZED, Dims
from vllm_triton.ops.fused_moe.reference import (
    present_experts,
    product_reference,
    quantized_dtype,
    scale_group,
    swiglu_reference,
)
from vllm_triton.ops.moe_align_block_size.op import expert_map
from vllm_triton.ops.platforms import triton_interprets
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK, per_value
from vllm_triton.ops.scaled_quant.reference import LARGEST, quantized, scaled_quant_reference

# What float32 may get wrong of an activation, relative to it and to the largest of its token.
_ROUNDING, _ROUNDING_OF_LARGEST = 1e-6, 3e-7


def draw_dims(pick: Any) -> Dims:
    """Names in lower case are no sizes but steer `arrange`."""
    present, absent = pick(1, 5), pick(0, 3)
    # Triton's interpreter rounds to int8 alone as torch does.
    dtype = pick.of(0, 0, 2) if triton_interprets() else pick.of(0, 0, 1, 2)
    blocks = pick(0, 1) if dtype else 0
    return {
        "T": pick.of(0, 1, 2, 7, 19, 70),
        "E": pick.of(pick(1, 70), 300) if blocks else pick(1, 70),
        "I": pick.of(pick(1, 40), 150) if blocks else pick(1, 40),
        "X": present,
        "Y": present + absent,
        "K": pick(1, min(present + absent, 3)),
        "biases": pick(0, 3),
        "limit": pick.of(0, 1),
        "quantized": dtype,
        "blocks": blocks,
        "static": pick(0, 3) if dtype and not blocks else 0,
        "settled": 1,
    }


def scaled(*shape: str) -> Any:
    """Weights that keep activations of the size of x: divided by the square root of the last size."""

    def values(dims: Dims, generator: torch.Generator) -> torch.Tensor:
        sizes = [2 * dims["I"] if name == "2*I" else dims[name] for name in shape]
        return torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5

    return values


def choices(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts for each token, as a router chooses them."""
    return torch.rand(dims["T"], dims["Y"], generator=generator).argsort(dim=1)[:, : dims["K"]]


def places(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """Where experts lie, of which some may be absent."""
    return expert_map(dims["X"], dims["Y"], generator)


def no_scales(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """In place of those that `arrange` makes, whose shape is not of dims alone."""
    return torch.empty(dims["X"], 0, 0)


def share(num_tokens: int, num_choices: int, hidden: int, intermediate: int, num_experts: int, **kind: int) -> Dims:
    """One device's share of a real model's layer."""
    sizes = {"T": num_tokens, "K": num_choices, "E": hidden, "I": intermediate}
    return sizes | {"X": num_experts, "Y": num_experts} | kind


def arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Reads of dims, where they are there:

    biases, static: a bit for that of each product.
    limit: swiglu_limit.
    quantized: counts the dtypes of weights, from 1 on; blocks: scales are of blocks.
    settled: no activation lies within a rounding of what is quantised to another value.
    """
    for bit, name in enumerate(("w1_bias", "w2_bias")):
        if not dims.get("biases", 0) >> bit & 1:
            inputs[name] = None
    inputs["swiglu_limit"] = float(dims.get("limit", 0))
    scales = ("w1_scale", "w2_scale", "a1_scale", "a2_scale")
    inputs |= dict.fromkeys(scales)
    if not dims.get("quantized"):
        return
    dtype = QUANTIZED[dims["quantized"] - 1]
    for bit, name in enumerate(("1", "2")):
        _quantize_weight(inputs, f"w{name}", dtype, bool(dims.get("blocks")), generator)
        if dims.get("static", 0) >> bit & 1:  # small enough that a few values leave the range
            inputs[f"a{name}_scale"] = (torch.rand(1, generator=generator) + 1) / LARGEST[dtype]
    unsure = torch.arange(dims["T"] if dims.get("settled") else 0)
    while len(unsure := unsure[_are_unsure(inputs, unsure)]):
        inputs["x"][unsure] = torch.randn(len(unsure), dims["E"], generator=generator).to(inputs["x"].dtype)


def _quantize_weight(
    inputs: dict[str, Any], name: str, dtype: torch.dtype, blocks: bool, generator: torch.Generator
) -> None:
    """Values of full range, whose scales undo it and keep activations of the size of x."""
    num_experts, num_rows, depth = shape = inputs[name].shape
    if dtype == torch.int8:
        inputs[name], deviation = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8), 74.0
    else:
        inputs[name], deviation = torch.randn(shape, generator=generator).to(dtype), 1.0
    halves = 2 if name == "w1" else 1
    rows, columns = (
        (halves * -(-num_rows // halves // SCALE_BLOCK), -(-depth // SCALE_BLOCK)) if blocks else (num_rows, 1)
    )
    scales = torch.rand(num_experts, rows, columns, generator=generator) + 0.5
    inputs[f"{name}_scale"] = scales / (deviation * depth**0.5)


def _are_unsure(inputs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Bools: which of these tokens have an activation that roundings before may quantise to another value."""
    x, ids = inputs["x"][tokens], inputs["topk_ids"][tokens]
    w2, a2_scale = inputs["w2"], inputs["a2_scale"]
    dtype, group_size = quantized_dtype(w2), scale_group(w2, inputs["w2_scale"], a2_scale)
    bias, scale, a1_scale = (inputs[name] for name in ("w1_bias", "w1_scale", "a1_scale"))
    unsure = torch.zeros(len(x), dtype=torch.bool)
    for place, rows, _ in present_experts(ids, inputs["expert_map"]):
        gate_up = product_reference(x[rows].double(), inputs["w1"], place, bias, scale, a1_scale, num_parts=2)
        magnitude = swiglu_reference(gate_up, inputs["swiglu_limit"]).abs()
        error = _ROUNDING * magnitude + _ROUNDING_OF_LARGEST * magnitude.amax(1, keepdim=True)
        low, high = ((magnitude + each).clamp(min=0).to(x.dtype).double() for each in (-error, error))
        smallest, largest = (
            per_value(scaled_quant_reference(each, dtype, group_size, a2_scale)[1], each.shape) for each in (low, high)
        )
        differs = quantized(low, largest, dtype).float() != quantized(high, smallest, dtype).float()
        unsure[rows] |= differs.any(1)
    return unsure
