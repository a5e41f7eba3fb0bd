from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.moe_align_block_size.op import expert_map
from vllm_triton.ops.moe_sum.reference import moe_sum_reference
from vllm_triton.ops.registry import define_op


def _draw_dims(pick: Any) -> Dims:
    return {"T": pick(0, 9), "K": pick(1, 8), "E": pick(1, 130), "X": pick(1, 9), "is_partial": 1}


def _ids(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    lowest = -1 if dims.get("is_partial") else 0
    return torch.randint(lowest, dims["X"], (dims["T"], dims["K"]), generator=generator)


def _map(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    present = int(torch.randint(dims["X"] + 1, (), generator=generator)) if dims.get("is_partial") else dims["X"]
    return expert_map(present, dims["X"], generator)


def _poison_absent(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    ids = inputs["topk_ids"].long()
    inputs["x"][(ids < 0) | (inputs["expert_map"][ids] < 0)] = float("nan")


@define_op(
    args={
        "x": Tensor("T K E", FLOATS),
        "topk_ids": Tensor("T K", (torch.int32,), values=_ids),
        "expert_map": Tensor("X", (torch.int32,), optional=True, values=_map),
    },
    results={"out": Tensor("T E", "x")},
    reference=moe_sum_reference,
    flops=lambda dims: dims["T"] * dims["K"] * dims["E"],
    test_dims=_draw_dims,
    bench_dims={
        "qwen3-30b-a3b 1 token": {"T": 1, "K": 8, "E": 2048, "X": 128},
        "qwen3-30b-a3b 512 tokens": {"T": 512, "K": 8, "E": 2048, "X": 128},
        "mixtral-8x7b 512 tokens": {"T": 512, "K": 2, "E": 4096, "X": 8},
    },
    arrange=_poison_absent,
    rows="T",
)
def moe_sum(x: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Adds what the experts of each token gave.

        y[t, e] = sum_k x[t, k, e]

    over the choices k whose expert is present: topk_ids[t, k] is not -1, nor is the map's entry for it. What is absent
    may hold anything, NaN too, and is not read.

    Args:
        x: [T, K, E] fp16|bf16|fp32, last dim contiguous.
        topk_ids: [T, K] int32, below X; -1 for no expert.
        expert_map: [X] int32, -1 for absent; None where all experts are present.
    Returns: [T, E], dtype of x; accumulates in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    """
