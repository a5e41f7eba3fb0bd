from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.fused_qk_norm_rope.reference import fused_qk_norm_rope_reference
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.rms_norm.op import EPS


def _positions(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(dims["M"], (dims["T"],), generator=generator)


def _arrange_weights(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """The entry "wide_weight" of dims is no size, but asks for weights in float32."""
    if dims.get("wide_weight"):
        inputs["query_weight"], inputs["key_weight"] = inputs["query_weight"].float(), inputs["key_weight"].float()


def _constraint(dims: Dims) -> str | None:
    if dims["R"] % 2 or dims["R"] > dims["D"]:
        return f"cos_sin must have an even size R of at most D = {dims['D']} in axis 1, got {dims['R']}"
    return None


def _test_dims(pick: Any) -> Dims:
    head_size = pick.of(2, 8, 24, 63, 64)
    rotary = 2 * pick(1, head_size // 2)
    sizes = {"T": pick(1, 6), "H": pick(1, 5), "G": pick(1, 3), "D": head_size, "M": pick(1, 40), "R": rotary}
    return sizes | {"wide_weight": pick(0, 1)}


def _bytes(dims: Dims, itemsize: int) -> int:
    return dims["T"] * (2 * (dims["H"] + dims["G"]) * dims["D"] * itemsize + 4 * dims["R"] + 8)


@define_op(
    args={
        "positions": Tensor("T", (torch.int64,), values=_positions),
        "query": Tensor("T H D", FLOATS),
        "key": Tensor("T G D", "query"),
        "query_weight": Tensor("D", FLOATS),
        "key_weight": Tensor("D", FLOATS),
        "cos_sin": Tensor("M R", (torch.float32,)),
        "eps": EPS,
    },
    results={"query_out": Tensor("T H D", "query"), "key_out": Tensor("T G D", "query")},
    reference=fused_qk_norm_rope_reference,
    constraint=_constraint,
    flops=lambda dims: dims["T"] * (dims["H"] + dims["G"]) * (4 * dims["D"] + 3 * dims["R"]),
    bytes=_bytes,
    test_dims=_test_dims,
    bench_dims={
        "qwen3-0.6b decode": {"T": 1, "H": 16, "G": 8, "D": 128, "M": 8192, "R": 128},
        "qwen3-0.6b 32 sequences": {"T": 32, "H": 16, "G": 8, "D": 128, "M": 8192, "R": 128},
        "qwen3-0.6b prefill": {"T": 512, "H": 16, "G": 8, "D": 128, "M": 8192, "R": 128},
        "gemma-3-1b decode": {"T": 1, "H": 4, "G": 1, "D": 256, "M": 8192, "R": 256, "wide_weight": 1},
        "gemma-3-1b prefill": {"T": 512, "H": 4, "G": 1, "D": 256, "M": 8192, "R": 256, "wide_weight": 1},
    },
    arrange=_arrange_weights,
    rows="T",
    inlineable=True,
)
def fused_qk_norm_rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises each head of query and key, and turns it by its token's position.

        n[t, h, d] = x[t, h, d] * rsqrt(mean_d x[t, h, d]^2 + eps) * weight[d]
        y[a] = n[a] * cos[p, j] - n[b] * sin[p, j]
        y[b] = n[b] * cos[p, j] + n[a] * sin[p, j]      p = positions[t], (a, b) = (j, R/2 + j), j = 0 .. R/2 - 1

    Elements R .. D-1 are those of n. It is `rms_norm` of the heads and `rotary_embedding`, without a rounding of n.

    Args:
        positions: [T] int64, each in 0 .. M-1. The caller sees to it: reading them here would stop the device.
        query: [T, H, D] fp16|bf16|fp32, last dim contiguous; a view of a fused projection is fine.
        key: [T, G, D], likewise, dtype of query.
        query_weight, key_weight: [D] fp16|bf16|fp32.
        cos_sin: [M, R] fp32, R even and at most D: row p holds cos[p] in its first half and sin[p] in its second.
        eps: added to the mean square, dimensionless, > 0.
    Returns: (query_out [T, H, D], key_out [T, G, D]), contiguous, dtype of query; computes in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4; Su et al., "RoFormer: Enhanced
        Transformer with Rotary Position Embedding", equation 34.
    """
