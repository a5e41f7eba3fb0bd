from collections.abc import Mapping
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, QUANTIZED, Dims, Scalar, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.scaled_quant.reference import PER_TENSOR, PER_TOKEN, scaled_quant_reference

GROUP_SIZES = (PER_TENSOR, PER_TOKEN, 32, 64, 128)


def _derived(dims: Dims) -> Dims:
    """Rows and columns of the scales."""
    group_size = dims["group_size"]
    if group_size == PER_TENSOR:
        return {"A": 1}
    return {"A": dims["T"], "Q": 1 if group_size == PER_TOKEN else -(-dims["K"] // group_size)}


def _constraint(dims: Dims) -> str | None:
    return None if dims["K"] else "x must have at least one column, got 0"


def _combination(arguments: Mapping[str, Any]) -> str | None:
    if arguments["scale"] is not None and arguments["group_size"] != PER_TENSOR:
        return f"scale must be None unless group_size is {PER_TENSOR}, got a tensor and {arguments['group_size']}"
    return None


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """dims["quantized"] counts the dtypes, from 1 on; a row of zeros where dims say so, and a given scale."""
    inputs["dtype"] = QUANTIZED[dims["quantized"] - 1]
    if dims.get("zeros"):
        inputs["x"][torch.randint(dims["T"], (), generator=generator)] = 0
    # Small enough that a few values leave the range.
    inputs["scale"] = torch.rand(1, generator=generator) * 0.01 + 0.003 if dims.get("static") else None


def _test_dims(pick: Any) -> Dims:
    group_size = pick.of(*GROUP_SIZES)
    sizes = {"T": pick.of(1, 2, 7, 40), "K": pick.of(pick(1, 140), 576), "group_size": group_size}
    is_static = pick(0, 1) if group_size == PER_TENSOR else 0
    return sizes | {"quantized": pick(1, 2), "zeros": pick(0, 1), "static": is_static}


def _int8(num_tokens: int, num_columns: int, group_size: int = PER_TOKEN) -> Dims:
    return {"T": num_tokens, "K": num_columns, "group_size": group_size, "quantized": 2}


def _fp8(num_tokens: int, num_columns: int, group_size: int) -> Dims:
    return _int8(num_tokens, num_columns, group_size) | {"quantized": 1}


@define_op(
    args={
        "x": Tensor("T K", FLOATS),
        "dtype": Scalar(
            torch.dtype, "be torch.float8_e4m3fn or torch.int8", lambda dtype: dtype in QUANTIZED, example=torch.int8
        ),
        "group_size": Scalar(
            int,
            f"be one of {', '.join(map(str, GROUP_SIZES))} ({PER_TENSOR}: per tensor, {PER_TOKEN}: per token)",
            lambda size: size in GROUP_SIZES,
            example=PER_TOKEN,
            size="group_size",
        ),
        "scale": Tensor("1", (torch.float32,), optional=True),
    },
    results={"values": Tensor("T K", "dtype"), "scales": Tensor("A Q?", (torch.float32,))},
    reference=scaled_quant_reference,
    constraint=_constraint,
    combination=_combination,
    derived=_derived,
    arrange=_arrange,
    test_dims=_test_dims,
    bench_dims={
        "smollm2 int8 per token, 1 token": _int8(1, 576),
        "smollm2 int8 per token, 32 sequences": _int8(32, 576),
        "smollm2 int8 per token, prefill": _int8(1024, 576),
        "llama-3-8b int8 per token, 32 sequences": _int8(32, 4096),
        "llama-3-8b int8 per tensor, 256 tokens": _int8(256, 4096, PER_TENSOR),
        "llama-3-8b fp8 per token, 256 tokens": _fp8(256, 4096, PER_TOKEN),
        "llama-3-8b fp8 static, 256 tokens": _fp8(256, 4096, PER_TENSOR) | {"static": 1},
        "qwen3-30b-a3b fp8 groups, 256 tokens": _fp8(256, 2048, 128),
    },
)
def scaled_quant(
    x: torch.Tensor, dtype: torch.dtype, group_size: int, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations as small numbers and scales, symmetric about zero, for `scaled_mm`.

        values[t, k] = round(x[t, k] / scale)      scale = max |x| of those that share it / largest

    where largest is 448 for fp8 e4m3 and 127 for int8. Values are rounded to the nearest, ties to even. A scale is at
    least 2^-126, so that zeros alone are zeros, not NaN.

    Args:
        x: [T, K] fp16|bf16|fp32, finite, last dim contiguous.
        dtype: of the values, torch.float8_e4m3fn or torch.int8.
        group_size: columns of a token that share a scale: 32, 64 or 128 (the last group may be shorter), PER_TOKEN for
            all of them, PER_TENSOR for one scale in all.
        scale: [1] fp32 above 0, known beforehand (static), for PER_TENSOR; values beyond its range are cut. None: found
            in x (dynamic).
    Returns: values [T, K] of `dtype`; scales fp32: [1] per tensor (static: a copy), [T, 1] per token, [T, ceil(K /
        group_size)] for groups.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Dettmers et al., "LLM.int8()", section 2.1 (per tensor, per token); DeepSeek-AI, "DeepSeek-V3 Technical
        Report", section 3.3.2 (groups).
    """
