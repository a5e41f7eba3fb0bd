from collections.abc import Mapping
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, QUANTIZED, Dims, Scalar, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK, scaled_mm_reference

# Products of this many int8 fit into a sum in int32.
MOST_INT8_COLUMNS = 2**17 - 1


def has_blocks(weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether scales are of blocks of the weight, not of all of it or of its rows."""
    num_rows = weight_scale.shape[0]
    is_of_rows = num_rows == 1 or num_rows == weight.shape[0]
    return not is_of_rows or (weight_scale.dim() == 2 and weight_scale.shape[1] > 1)


def _constraint(dims: Dims) -> str | None:
    num_columns = dims.get("Q", 1)
    blocks = -(-dims["N"] // SCALE_BLOCK), -(-dims["K"] // SCALE_BLOCK)
    if dims["A"] not in (1, dims["T"]):
        return f"a_scale must have 1 row or T = {dims['T']}, got {dims['A']}"
    if num_columns == 1 and dims["C"] in (1, dims["N"]):
        return None
    if (dims["C"], num_columns) != blocks:
        shapes = f"[1], [{dims['N']}, 1] or, for blocks of {SCALE_BLOCK} x {SCALE_BLOCK}, {list(blocks)}"
        return f"weight_scale must have shape {shapes}, got {[dims['C'], num_columns]}"
    return None


def _combination(arguments: Mapping[str, Any]) -> str | None:
    a, a_scale, weight_scale = (arguments[name] for name in ("a", "a_scale", "weight_scale"))
    bias, out_dtype = arguments["bias"], arguments["out_dtype"]
    if max(a_scale.shape[1:], default=1) != max(weight_scale.shape[1:], default=1):
        return (
            f"a_scale must have as many columns as weight_scale {list(weight_scale.shape)}, got {list(a_scale.shape)}"
        )
    if bias is not None and bias.dtype != out_dtype:
        return f"bias must have the dtype of out_dtype, {out_dtype}, got {bias.dtype}"
    if a.dtype == torch.int8 and a.shape[1] > MOST_INT8_COLUMNS:
        return f"a must have at most {MOST_INT8_COLUMNS} columns in int8, whose sums are int32, got {a.shape[1]}"
    return None


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """dims["quantized"] counts the dtypes, from 1 on."""
    if QUANTIZED[dims["quantized"] - 1] == torch.int8:
        for name in ("a", "weight"):
            shape = inputs[name].shape
            inputs[name] = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    for name in ("a_scale", "weight_scale"):
        inputs[name] = inputs[name].abs() * 0.02 + 0.001
    if inputs["bias"] is not None:
        inputs["bias"] = inputs["bias"].to(inputs["out_dtype"])
    if not dims.get("bias"):
        inputs["bias"] = None


def _test_dims(pick: Any) -> Dims:
    T, N, K = pick.of(1, 2, 7, 17, 63, 130), pick(1, 150), pick.of(pick(1, 140), 300)
    dims = {"T": T, "N": N, "K": K, "quantized": pick(1, 2), "bias": pick(0, 1)}
    if pick(0, 1):
        return dims | _blocks(T, N, K)
    return dims | {"A": pick.of(1, T), "C": pick.of(1, N)} | pick.of({}, {"Q": 1})


def _blocks(T: int, N: int, K: int) -> Dims:
    return {"A": T, "C": -(-N // SCALE_BLOCK), "Q": -(-K // SCALE_BLOCK)}


def _int8(T: int, N: int, K: int) -> Dims:
    """Per token and channel."""
    return {"T": T, "N": N, "K": K, "A": T, "C": N, "Q": 1, "quantized": 2}


def _fp8(T: int, N: int, K: int, blocks: bool = False) -> Dims:
    return _int8(T, N, K) | (_blocks(T, N, K) if blocks else {}) | {"quantized": 1}


@define_op(
    args={
        "a": Tensor("T K", QUANTIZED),
        "weight": Tensor("N K", "a"),
        "a_scale": Tensor("A Q?", (torch.float32,)),
        "weight_scale": Tensor("C Q?", (torch.float32,)),
        "out_dtype": Scalar(
            torch.dtype, "be float16, bfloat16 or float32", lambda dtype: dtype in FLOATS, example=torch.bfloat16
        ),
        "bias": Tensor("N", FLOATS, optional=True),
    },
    results={"out": Tensor("T N", "out_dtype")},
    reference=scaled_mm_reference,
    constraint=_constraint,
    combination=_combination,
    arrange=_arrange,
    flops=lambda dims: 2 * dims["T"] * dims["N"] * dims["K"],
    test_dims=_test_dims,
    bench_dims={
        "smollm2 o int8 decode": _int8(1, 576, 576),
        "smollm2 gate_up int8 decode": _int8(1, 3072, 576),
        "smollm2 down int8 decode": _int8(1, 576, 1536),
        "smollm2 head int8 decode": _int8(1, 49152, 576),
        "smollm2 gate_up int8 32 sequences": _int8(32, 3072, 576),
        "smollm2 gate_up int8 prefill": _int8(1024, 3072, 576),
        "llama-3-8b qkv int8 decode": _int8(1, 6144, 4096),
        "llama-3-8b qkv int8 4 sequences": _int8(4, 6144, 4096),
        "llama-3-8b qkv int8 32 sequences": _int8(32, 6144, 4096),
        "llama-3-8b qkv int8 256 tokens": _int8(256, 6144, 4096),
        "llama-3-8b qkv fp8 decode": _fp8(1, 6144, 4096),
        "llama-3-8b qkv fp8 32 sequences": _fp8(32, 6144, 4096),
        "qwen3-30b-a3b qkv fp8 blocks decode": _fp8(1, 5120, 2048, blocks=True),
        "qwen3-30b-a3b qkv fp8 blocks 256 tokens": _fp8(256, 5120, 2048, blocks=True),
        "qwen3-30b-a3b expert fp8 blocks 16 tokens": _fp8(16, 1536, 2048, blocks=True),
    },
    uses_dot=True,
)
def scaled_mm(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A dense projection of small numbers, whose scales are per tensor, per token and channel, or per block.

        y[t, n] = sum_b a_scale[t, b] * weight_scale[n // 128, b] * (sum_k a[t, k] * weight[n, k]) + bias[n]

    where k runs over the 128 columns of block b. With one scale for a whole row, b has one value and k all.

    Args:
        a: [T, K] fp8 e4m3 or int8, last dim contiguous; `scaled_quant` makes it and its scales.
        weight: [N, K], dtype of a.
        a_scale: fp32: [1] per tensor, [T, 1] per token, [T, ceil(K / 128)] where the weight's are per block.
        weight_scale: fp32: [1] per tensor, [N, 1] per channel, [ceil(N / 128), ceil(K / 128)] per block.
        out_dtype: of the result, torch.float16, torch.bfloat16 or torch.float32.
        bias: [N] of out_dtype, or None.
    Returns: [T, N] of out_dtype; sums fp8 in fp32 and int8 in int32, where K may be 2^17 - 1 at most; scales in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Xiao et al., "SmoothQuant", section 3 (per token and channel); DeepSeek-AI, "DeepSeek-V3 Technical Report",
        section 3.3.2 (blocks).
    """
