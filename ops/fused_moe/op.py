import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, QUANTIZED, Dims, Scalar, Tensor
from vllm_triton.ops.fused_moe.draws import arrange, choices, draw_dims, no_scales, places, scaled, share
from vllm_triton.ops.fused_moe.reference import fused_moe_reference, has_blocks
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.scaled_mm.op import MOST_INT8_COLUMNS
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK

_SCALES = ("w1_scale", "w2_scale", "a1_scale", "a2_scale")


def _constraint(dims: Dims) -> str | None:
    hidden, middle = dims["E"], dims["I"]
    of_hidden, of_middle = -(-hidden // SCALE_BLOCK), -(-middle // SCALE_BLOCK)
    for product, rows, blocks in (
        ("1", 2 * middle, [2 * of_middle, of_hidden]),
        ("2", hidden, [of_hidden, of_middle]),
    ):
        if f"C{product}" not in dims:
            continue
        given = [dims[f"C{product}"], dims[f"Q{product}"]]
        if given not in ([rows, 1], blocks):
            shapes = f"[X, {rows}, 1] or, for blocks of {SCALE_BLOCK} x {SCALE_BLOCK}, [X, {blocks[0]}, {blocks[1]}]"
            return f"w{product}_scale must have shape {shapes}, got {[dims['X'], *given]}"
    return None


def _combination(arguments: Mapping[str, Any]) -> str | None:
    x, w1, w2 = (arguments[name] for name in ("x", "w1", "w2"))
    if w1.dtype not in QUANTIZED:
        if w1.dtype != x.dtype:
            return f"w1 must have the dtype of x, {x.dtype}, or a quantized one, got {w1.dtype}"
        given = [name for name in _SCALES if arguments[name] is not None]
        return f"{given[0]} must be None for weights of {w1.dtype}, got a tensor" if given else None
    for product, weight in (("1", w1), ("2", w2)):
        scale, a_scale = arguments[f"w{product}_scale"], arguments[f"a{product}_scale"]
        if scale is None:
            return f"w{product}_scale must be a tensor for weights of {w1.dtype}, got None"
        if a_scale is not None and has_blocks(weight, scale):
            return f"a{product}_scale must be None where w{product}_scale is of blocks, got a tensor"
        if w1.dtype == torch.int8 and weight.shape[2] > MOST_INT8_COLUMNS:
            return (
                f"w{product} must have at most {MOST_INT8_COLUMNS} columns in int8, whose sums are int32, "
                f"got {weight.shape[2]}"
            )
    return None


def _bytes(dims: Dims, itemsize: int) -> int:
    """At least the weights of the experts that can have been chosen, and the tokens."""
    weights = 3 * dims["I"] * min(dims["X"], dims["T"] * dims["K"]) * (1 if "C1" in dims else itemsize)
    return dims["E"] * (weights + 2 * dims["T"] * itemsize)


# What one of several devices has: a quarter of the experts and of the choices, or an eighth of each expert.
_QWEN3_1, _QWEN3_32, _QWEN3_512, _QWEN3_2048 = (
    share(num_tokens, num_choices, 2048, 768, 32) for num_tokens, num_choices in ((1, 8), (32, 2), (512, 2), (2048, 2))
)
_FP8, _INT8 = {"quantized": 1}, {"quantized": 2}


@define_op(
    args={
        "x": Tensor("T E", FLOATS),
        "w1": Tensor("X 2*I E", FLOATS + QUANTIZED, values=scaled("X", "2*I", "E")),
        "w2": Tensor("X E I", "w1", values=scaled("X", "E", "I")),
        "topk_weights": Tensor("T K", (torch.float32,)),
        "topk_ids": Tensor("T K", (torch.int32,), values=choices),
        "expert_map": Tensor("Y", (torch.int32,), optional=True, values=places),
        "w1_bias": Tensor("X 2*I", "x", optional=True),
        "w2_bias": Tensor("X E", "x", optional=True),
        "swiglu_limit": Scalar(
            float, "be finite and at least 0 (0 means silu_and_mul)", lambda limit: 0 <= limit < math.inf, example=0.0
        ),
        "w1_scale": Tensor("X C1 Q1", (torch.float32,), optional=True, values=no_scales),
        "w2_scale": Tensor("X C2 Q2", (torch.float32,), optional=True, values=no_scales),
        "a1_scale": Tensor("1", (torch.float32,), optional=True),
        "a2_scale": Tensor("1", (torch.float32,), optional=True),
    },
    results={"out": Tensor("T E", "x")},
    reference=fused_moe_reference,
    constraint=_constraint,
    combination=_combination,
    flops=lambda dims: 6 * dims["T"] * dims["K"] * dims["E"] * dims["I"],
    bytes=_bytes,
    arrange=arrange,
    test_dims=draw_dims,
    bench_dims={
        "qwen3-30b-a3b 1 token, 32 of 128 experts": _QWEN3_1,
        "qwen3-30b-a3b 32 tokens, 32 of 128 experts": _QWEN3_32,
        "qwen3-30b-a3b 512 tokens, 32 of 128 experts": _QWEN3_512,
        "qwen3-30b-a3b 2048 tokens, 32 of 128 experts": _QWEN3_2048,
        "qwen3-30b-a3b int8 1 token, 32 of 128 experts": _QWEN3_1 | _INT8,
        "qwen3-30b-a3b int8 32 tokens, 32 of 128 experts": _QWEN3_32 | _INT8,
        "qwen3-30b-a3b int8 512 tokens, 32 of 128 experts": _QWEN3_512 | _INT8,
        "qwen3-30b-a3b int8 2048 tokens, 32 of 128 experts": _QWEN3_2048 | _INT8,
        "qwen3-30b-a3b fp8 blocks 1 token, 32 of 128 experts": _QWEN3_1 | _FP8 | {"blocks": 1},
        "qwen3-30b-a3b fp8 blocks 512 tokens, 32 of 128 experts": _QWEN3_512 | _FP8 | {"blocks": 1},
        "mixtral-8x7b 1 token, an eighth of each expert": share(1, 2, 4096, 1792, 8),
        "mixtral-8x7b 512 tokens, an eighth of each expert": share(512, 2, 4096, 1792, 8),
        "mixtral-8x7b fp8 512 tokens, an eighth of each expert": share(512, 2, 4096, 1792, 8, quantized=1, static=3),
        "gpt-oss-20b 1 token, an eighth of each expert": share(1, 4, 2880, 360, 32, biases=3, limit=7),
        "gpt-oss-20b 512 tokens, an eighth of each expert": share(512, 4, 2880, 360, 32, biases=3, limit=7),
    },
    rows="T",
    uses_dot=True,
)
def fused_moe(
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
    """A feed-forward layer of which each token takes K of many, its experts.

        y[t] = sum_k topk_weights[t, k] * (w2[s] @ activation(w1[s] @ x[t] + w1_bias[s]) + w2_bias[s])
        s = expert_map[topk_ids[t, k]]

    over the choices whose expert is present: neither the id nor the map's entry for it is -1. A token of whose experts
    none is present gives 0.

    The activation is silu_and_mul, or with a limit that of gpt-oss, of gate and up, the halves of its argument:

        g * sigmoid(1.702 * g) * (u + 1)        g = min(gate, limit), u = min(max(up, -limit), limit)

    Where the weights are quantised, x and the activations are too, as `scaled_quant` does it, and products are those of
    `scaled_mm`.

    Args:
        x: [T, E] fp16|bf16|fp32, last dim contiguous.
        w1: [X, 2*I, E], dtype of x, or fp8 e4m3 or int8 with scales: the gate's rows of each expert, then the up
            projection's.
        w2: [X, E, I], dtype of w1: the down projection of each expert.
        topk_weights: [T, K] fp32.
        topk_ids: [T, K] int32, below the number of experts; -1 for no expert.
        expert_map: [Y] int32, where in w1 and w2 each expert lies, -1 for absent; None where expert x lies at x.
        w1_bias: [X, 2*I], dtype of x, or None.
        w2_bias: [X, E], dtype of x, or None.
        swiglu_limit: bound on gate and up; 0 for silu_and_mul.
        w1_scale: fp32: [X, 2*I, 1] per channel, or [X, 2*ceil(I/128), ceil(E/128)] per block of 128 x 128, where blocks
            of the up projection begin at its first row. An expert with one scale for all has it expanded.
        w2_scale: fp32: [X, E, 1], or [X, ceil(E/128), ceil(I/128)].
        a1_scale, a2_scale: [1] fp32 above 0, the scale of what meets w1 and w2, known beforehand (static); not where
            the weight's are per block. None: found for each token, or for groups of 128 where they are per block.
    Returns: [T, E], dtype of x; products and sums accumulate in fp32 (of int8 in int32), activations and what each
        expert gives are rounded to the dtype of x.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
        section 2; Jiang et al., "Mixtral of Experts", section 2.1; OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card",
        section 2 (biases, clamped activation); of quantised weights as of `scaled_mm`.
    """
