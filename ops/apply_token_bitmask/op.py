from typing import Any

import torch

from vllm_triton.ops.apply_token_bitmask.reference import apply_token_bitmask_reference
from vllm_triton.ops.contract import Dims, Tensor
from vllm_triton.ops.registry import define_op


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Distinct rows, some of them padding, and words of random bits."""
    inputs["rows"].fill_(-1)
    rows = torch.randperm(dims["B"], generator=generator)[: dims["R"]]
    inputs["rows"][: len(rows)] = rows
    inputs["rows"][torch.rand(dims["R"], generator=generator) < 0.25] = -1
    words = torch.randint(-(2**31), 2**31, inputs["bitmask"].shape, generator=generator)
    inputs["bitmask"].copy_(words)


def _constraint(dims: Dims) -> str | None:
    needed = -(-dims["V"] // 32)
    return f"bitmask must have at least {needed} words a row, got {dims['W']}" if dims["W"] < needed else None


def _test_dims(pick: Any) -> Dims:
    vocabulary = pick(1, 130)
    return {"B": pick(1, 5), "V": vocabulary, "R": pick(0, 5), "W": -(-vocabulary // 32) + pick(0, 1)}


@define_op(
    args={
        "logits": Tensor("B V", (torch.float32,), mutated=True),
        "bitmask": Tensor("R W", (torch.int32,)),
        "rows": Tensor("R", (torch.int64,)),
    },
    reference=apply_token_bitmask_reference,
    constraint=_constraint,
    # At most: every logit of the named rows is written, none is read.
    bytes=lambda dims, itemsize: dims["R"] * (dims["V"] * itemsize + 4 * dims["W"] + 8),
    test_dims=_test_dims,
    bench_dims={"32 rows": {"B": 32, "V": 49152, "R": 32, "W": 1536}},
    arrange=_arrange,
)
def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Forbids the tokens of some rows whose bit is not set: grammars and lists of allowed tokens.

        logits[rows[r], v] = -inf  where bit v % 32 of bitmask[r, v // 32] is 0

    One pass over the named rows, which writes what it forbids and reads no logit.

    Args:
        logits: [B, V] fp32.
        bitmask: [R, W] int32, W >= V / 32; the lowest bit of a word is its first token.
        rows: [R] int64, distinct rows below B; -1 for padding, which writes nothing.
    Returns: nothing.
    Mutates: logits.
    Raises: ShapeError, DTypeError.
    Source: Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models".
    """
