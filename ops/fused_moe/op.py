import math
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Scalar, Tensor
from vllm_triton.ops.fused_moe.reference import fused_moe_reference
from vllm_triton.ops.moe_align_block_size.op import expert_map
from vllm_triton.ops.registry import define_op


def _draw_dims(pick: Any) -> Dims:
    present, absent = pick(1, 5), pick(0, 3)
    return {
        "T": pick.of(0, 1, 2, 7, 19, 70),
        "E": pick(1, 70),
        "I": pick(1, 40),
        "X": present,
        "Y": present + absent,
        "K": pick(1, min(present + absent, 3)),
        "biases": pick(0, 3),
        "limit": pick.of(0, 1),
    }


def _scaled(*shape: str) -> Any:
    """Weights that keep activations of the size of x: divided by the square root of the last size."""

    def values(dims: Dims, generator: torch.Generator) -> torch.Tensor:
        sizes = [2 * dims["I"] if name == "2*I" else dims[name] for name in shape]
        return torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5

    return values


def _ids(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts for each token, as a router chooses them."""
    return torch.rand(dims["T"], dims["Y"], generator=generator).argsort(dim=1)[:, : dims["K"]]


def _share(num_tokens: int, num_choices: int, hidden: int, intermediate: int, num_experts: int) -> Dims:
    sizes = {"T": num_tokens, "K": num_choices, "E": hidden, "I": intermediate}
    return sizes | {"X": num_experts, "Y": num_experts}


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """dims["biases"] has a bit for each bias, dims["limit"] is swiglu_limit."""
    for bit, name in enumerate(("w1_bias", "w2_bias")):
        if not dims.get("biases", 0) >> bit & 1:
            inputs[name] = None
    inputs["swiglu_limit"] = float(dims.get("limit", 0))


def _map(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return expert_map(dims["X"], dims["Y"], generator)


@define_op(
    args={
        "x": Tensor("T E", FLOATS),
        "w1": Tensor("X 2*I E", "x", values=_scaled("X", "2*I", "E")),
        "w2": Tensor("X E I", "x", values=_scaled("X", "E", "I")),
        "topk_weights": Tensor("T K", (torch.float32,)),
        "topk_ids": Tensor("T K", (torch.int32,), values=_ids),
        "expert_map": Tensor("Y", (torch.int32,), optional=True, values=_map),
        "w1_bias": Tensor("X 2*I", "x", optional=True),
        "w2_bias": Tensor("X E", "x", optional=True),
        "swiglu_limit": Scalar(
            float, "be finite and at least 0 (0 means silu_and_mul)", lambda limit: 0 <= limit < math.inf, example=0.0
        ),
    },
    results={"out": Tensor("T E", "x")},
    reference=fused_moe_reference,
    flops=lambda dims: 6 * dims["T"] * dims["K"] * dims["E"] * dims["I"],
    # At least the weights of the experts that can have been chosen, and the tokens.
    bytes=lambda dims, itemsize: (
        itemsize * dims["E"] * (3 * dims["I"] * min(dims["X"], dims["T"] * dims["K"]) + 2 * dims["T"])
    ),
    arrange=_arrange,
    test_dims=_draw_dims,
    # What one of several devices has: a quarter of the experts and of the choices, or an eighth of each expert.
    bench_dims={
        "qwen3-30b-a3b 1 token, 32 of 128 experts": _share(1, 8, 2048, 768, 32),
        "qwen3-30b-a3b 32 tokens, 32 of 128 experts": _share(32, 2, 2048, 768, 32),
        "qwen3-30b-a3b 512 tokens, 32 of 128 experts": _share(512, 2, 2048, 768, 32),
        "qwen3-30b-a3b 2048 tokens, 32 of 128 experts": _share(2048, 2, 2048, 768, 32),
        "mixtral-8x7b 1 token, an eighth of each expert": _share(1, 2, 4096, 1792, 8),
        "mixtral-8x7b 512 tokens, an eighth of each expert": _share(512, 2, 4096, 1792, 8),
        "gpt-oss-20b 1 token, an eighth of each expert": _share(1, 4, 2880, 360, 32) | {"biases": 3, "limit": 7},
        "gpt-oss-20b 512 tokens, an eighth of each expert": _share(512, 4, 2880, 360, 32) | {"biases": 3, "limit": 7},
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
) -> torch.Tensor:
    """A feed-forward layer of which each token takes K of many, its experts.

        y[t] = sum_k topk_weights[t, k] * (w2[s] @ activation(w1[s] @ x[t] + w1_bias[s]) + w2_bias[s])
        s = expert_map[topk_ids[t, k]]

    over the choices whose expert is present: neither the id nor the map's entry for it is -1. A token of whose experts
    none is present gives 0.

    The activation is silu_and_mul, or with a limit that of gpt-oss, of gate and up, the halves of its argument:

        g * sigmoid(1.702 * g) * (u + 1)        g = min(gate, limit), u = min(max(up, -limit), limit)

    Args:
        x: [T, E] fp16|bf16|fp32, last dim contiguous.
        w1: [X, 2*I, E], dtype of x: the gate's rows of each expert, then the up projection's.
        w2: [X, E, I], dtype of x: the down projection of each expert.
        topk_weights: [T, K] fp32.
        topk_ids: [T, K] int32, below the number of experts; -1 for no expert.
        expert_map: [Y] int32, where in w1 and w2 each expert lies, -1 for absent; None where expert x lies at x.
        w1_bias: [X, 2*I], dtype of x, or None.
        w2_bias: [X, E], dtype of x, or None.
        swiglu_limit: bound on gate and up; 0 for silu_and_mul.
    Returns: [T, E], dtype of x; products and sums accumulate in fp32, activations and what each expert gives are
        rounded to the dtype of x.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
        section 2; Jiang et al., "Mixtral of Experts", section 2.1; OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card",
        section 2 (biases, clamped activation).
    """
