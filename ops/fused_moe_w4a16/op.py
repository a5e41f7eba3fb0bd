from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.fused_moe.draws import choices, places
from vllm_triton.ops.fused_moe_w4a16.reference import fused_moe_w4a16_reference
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.w4a16_mm.layout import BLOCK, LARGEST_ZERO

# Of q - zero, where both are drawn evenly.
_DEVIATION = 6.7


def packed_share(
    num_tokens: int, num_choices: int, hidden: int, intermediate: int, num_experts: int, group_size: int, **kind: int
) -> Dims:
    """One device's share of a real model's layer.

    Args:
        group_size: inputs that share a scale.
        kind: see `_arrange`.
    """
    inputs = {"Q1": hidden // BLOCK, "Q2": intermediate // BLOCK}
    groups = {"S1": hidden // group_size, "S2": intermediate // group_size}
    return {"T": num_tokens, "K": num_choices, "X": num_experts, "Y": num_experts} | inputs | groups | kind


def _constraint(dims: Dims) -> str | None:
    for product, inputs in (("1", "x"), ("2", "w2_quants")):
        num_blocks, num_groups = dims[f"Q{product}"], dims[f"S{product}"]
        if not num_blocks:
            return f"{inputs} must have one block of 32 inputs at least, got 0"
        if not num_groups or num_blocks % num_groups:
            return (
                f"w{product}_scales must have a number of groups, size S{product}, that divides the {num_blocks} "
                f"blocks of 32 inputs, got {num_groups}"
            )
    return None


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Weights that keep activations of the size of x. Reads of dims, where they are there:

    zeros: a bit for those of each product; by default both are missing.
    scales: place of their dtype among FLOATS, from 1 on; by default fp16, as checkpoints have them.
    """
    dtype = FLOATS[dims.get("scales", 1) - 1]
    for bit, product in enumerate(("w1", "w2")):
        quants, shape = inputs[f"{product}_quants"], inputs[f"{product}_scales"].shape
        words = torch.randint(-(2**31), 2**31, quants.shape, generator=generator, dtype=torch.int64)
        scales = (torch.rand(shape, generator=generator) + 0.5) / (_DEVIATION * (8 * quants.shape[2]) ** 0.5)
        zeros = torch.randint(0, LARGEST_ZERO + 1, shape, generator=generator).to(dtype)
        inputs[f"{product}_quants"], inputs[f"{product}_scales"] = words.int(), scales.to(dtype)
        inputs[f"{product}_zeros"] = zeros if dims.get("zeros", 0) >> bit & 1 else None


def _test_dims(pick: Any) -> Dims:
    present, absent, groups = pick(1, 5), pick(0, 3), (pick(1, 3), pick(1, 3))
    return {
        "T": pick.of(0, 1, 2, 7, 19, 70),
        "Q1": groups[0] * pick(1, 3),
        "Q2": groups[1] * pick(1, 2),
        "S1": groups[0],
        "S2": groups[1],
        "X": present,
        "Y": present + absent,
        "K": pick(1, min(present + absent, 3)),
        "zeros": pick(0, 3),
        "scales": pick(1, len(FLOATS)),
    }


def _bytes(dims: Dims, itemsize: int) -> int:
    """At least the weights of the experts that can have been chosen, with scales of 2 bytes, and the tokens."""
    hidden, middle = BLOCK * dims["Q1"], BLOCK * dims["Q2"]
    scales = 2 * (2 * middle * dims["S1"] + hidden * dims["S2"])
    return (
        min(dims["X"], dims["T"] * dims["K"]) * (3 * hidden * middle // 2 + scales) + 2 * dims["T"] * hidden * itemsize
    )


@define_op(
    args={
        "x": Tensor("T 32*Q1", FLOATS),
        "w1_quants": Tensor("X 4*Q2 4*Q1 16", (torch.int32,)),
        "w1_scales": Tensor("X 4*Q2 S1 16", FLOATS),
        "w1_zeros": Tensor("X 4*Q2 S1 16", "w1_scales", optional=True),
        "w2_quants": Tensor("X 2*Q1 4*Q2 16", (torch.int32,)),
        "w2_scales": Tensor("X 2*Q1 S2 16", FLOATS),
        "w2_zeros": Tensor("X 2*Q1 S2 16", "w2_scales", optional=True),
        "topk_weights": Tensor("T K", (torch.float32,)),
        "topk_ids": Tensor("T K", (torch.int32,), values=choices),
        "expert_map": Tensor("Y", (torch.int32,), optional=True, values=places),
    },
    results={"out": Tensor("T 32*Q1", "x")},
    reference=fused_moe_w4a16_reference,
    constraint=_constraint,
    flops=lambda dims: 6 * dims["T"] * dims["K"] * BLOCK * dims["Q1"] * BLOCK * dims["Q2"],
    bytes=_bytes,
    arrange=_arrange,
    test_dims=_test_dims,
    bench_dims={  # As those of fused_moe: a quarter of the experts and of the choices, or an eighth of each expert.
        "qwen3-30b-a3b 1 token, 32 of 128 experts": packed_share(1, 8, 2048, 768, 32, 128),
        "qwen3-30b-a3b 32 tokens, 32 of 128 experts": packed_share(32, 2, 2048, 768, 32, 128),
        "qwen3-30b-a3b 512 tokens, 32 of 128 experts": packed_share(512, 2, 2048, 768, 32, 128),
        "qwen3-30b-a3b 2048 tokens, 32 of 128 experts": packed_share(2048, 2, 2048, 768, 32, 128),
        "qwen3-30b-a3b zeros 1 token, 32 of 128 experts": packed_share(1, 8, 2048, 768, 32, 128, zeros=3),
        "qwen3-30b-a3b zeros 512 tokens, 32 of 128 experts": packed_share(512, 2, 2048, 768, 32, 128, zeros=3),
        "mixtral-8x7b 1 token, an eighth of each expert": packed_share(1, 2, 4096, 1792, 8, 128),
    },
    rows="T",
    uses_dot=True,
)
def fused_moe_w4a16(
    x: torch.Tensor,
    w1_quants: torch.Tensor,
    w1_scales: torch.Tensor,
    w1_zeros: torch.Tensor | None,
    w2_quants: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_zeros: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """A feed-forward layer of experts as `fused_moe`, by weights of 4-bit values as `w4a16_mm` takes them.

        y[t] = sum_k topk_weights[t, k] * (w2[s] @ silu_and_mul(w1[s] @ x[t]))
        s = expert_map[topk_ids[t, k]]
        w[s, n, i] = scale[s, n, g(i)] * (q[s, n, i] - zero[s, n, g(i)])

    over the choices whose expert is present, see `fused_moe`; g(i) = i // (32*Q1/S1), and of w2 i // (32*Q2/S2).

    Args:
        x: [T, 32*Q1] fp16|bf16|fp32, last dim contiguous.
        w1_quants: [X, 4*Q2, 4*Q1, 16] int32: of each expert what `w4a16_mm.layout.pack` makes of the rows of the gate's
            and the up projection's weight by turns: row 2*i is the gate's row i, row 2*i + 1 that of the up projection.
            A program reads both, which lie together so.
        w1_scales: [X, 4*Q2, S1, 16] fp16|bf16|fp32, likewise. S1 divides Q1.
        w1_zeros: [X, 4*Q2, S1, 16], dtype of w1_scales: integers from 0 to 16; None stands for 8.
        w2_quants: [X, 2*Q1, 4*Q2, 16] int32: the down projection of each expert, packed.
        w2_scales: [X, 2*Q1, S2, 16] fp16|bf16|fp32. S2 divides Q2.
        w2_zeros: [X, 2*Q1, S2, 16], dtype of w2_scales, or None.
        topk_weights: [T, K] fp32.
        topk_ids: [T, K] int32, below the number of experts; -1 for no expert.
        expert_map: [Y] int32, where in w1 and w2 each expert lies, -1 for absent; None where expert x lies at x.
    Returns: [T, 32*Q1], dtype of x; products and sums accumulate in fp32; values of weights, activations and what each
        expert gives are rounded to the dtype of x.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: as of `fused_moe` and `w4a16_mm`.
    """
