from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Scalar, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.rotary_embedding.reference import rotary_embedding_reference


def _positions(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(dims["M"], (dims["T"],), generator=generator)


def _either_layout(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    inputs["interleaved"] = bool(torch.randint(2, (), generator=generator))


def _constraint(dims: Dims) -> str | None:
    if dims["R"] % 2 or dims["R"] > dims["D"]:
        return f"cos_sin must have an even size R of at most D = {dims['D']} in axis 1, got {dims['R']}"
    return None


def _test_dims(pick: Any) -> Dims:
    head_size = pick.of(2, 8, 24, 63, 64)
    rotary = 2 * pick(1, head_size // 2)
    return {"T": pick(1, 6), "H": pick(1, 5), "G": pick(1, 3), "D": head_size, "M": pick(1, 40), "R": rotary}


def _bytes(dims: Dims, itemsize: int) -> int:
    return dims["T"] * (2 * (dims["H"] + dims["G"]) * dims["D"] * itemsize + 4 * dims["R"] + 8)


@define_op(
    args={
        "positions": Tensor("T", (torch.int64,), values=_positions),
        "query": Tensor("T H D", FLOATS),
        "key": Tensor("T G D", "query"),
        "cos_sin": Tensor("M R", (torch.float32,)),
        "interleaved": Scalar(bool, "be True or False", lambda interleaved: True, example=False),
    },
    results={"query_out": Tensor("T H D", "query"), "key_out": Tensor("T G D", "query")},
    reference=rotary_embedding_reference,
    constraint=_constraint,
    flops=lambda dims: 3 * dims["T"] * (dims["H"] + dims["G"]) * dims["R"],
    bytes=_bytes,
    test_dims=_test_dims,
    bench_dims={
        "smollm2 decode": {"T": 1, "H": 9, "G": 3, "D": 64, "M": 8192, "R": 64},
        "smollm2 prefill": {"T": 1024, "H": 9, "G": 3, "D": 64, "M": 8192, "R": 64},
        "llama-3-8b": {"T": 256, "H": 32, "G": 8, "D": 128, "M": 8192, "R": 128},
    },
    arrange=_either_layout,
    rows="T",
    inlineable=True,
)
def rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns pairs of each head's elements by an angle that grows with the token's position.

        y[a] = x[a] * cos[p, j] - x[b] * sin[p, j]
        y[b] = x[b] * cos[p, j] + x[a] * sin[p, j]      p = positions[t], j = 0 .. R/2 - 1

    Pair j is (a, b) = (j, R/2 + j), or (2j, 2j + 1) where interleaved. Elements R .. D-1 are copied.

    Args:
        positions: [T] int64, each in 0 .. M-1. The caller sees to it: reading them here would stop the device.
        query: [T, H, D] fp16|bf16|fp32, last dim contiguous; a view of a fused projection is fine.
        key: [T, G, D], likewise, dtype of query.
        cos_sin: [M, R] fp32, R even and at most D: row p holds cos[p] in its first half and sin[p] in its second.
        interleaved: whether the elements of a pair are neighbours.
    Returns: (query_out [T, H, D], key_out [T, G, D]), contiguous, dtype of query; computes in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34.
    """
