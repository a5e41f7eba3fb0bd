import math
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Scalar, Tensor
from vllm_triton.ops.embedding.reference import embedding_reference
from vllm_triton.ops.registry import define_op


def _token_ids(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(dims["V"], (dims["T"],), generator=generator)


def _scaled_or_not(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """The entry "scaled" of dims is no size, but asks for a scale other than 1."""
    if dims.get("scaled"):
        inputs["scale"] = math.sqrt(dims["E"]) + 0.1


@define_op(
    args={
        "token_ids": Tensor("T", (torch.int64,), values=_token_ids),
        "table": Tensor("V E", FLOATS),
        "scale": Scalar(float, "be finite and greater than 0", lambda scale: 0 < scale < math.inf, example=1.0),
    },
    results={"out": Tensor("T E", "table")},
    reference=embedding_reference,
    # Only the rows that are named are read.
    bytes=lambda dims, itemsize: dims["T"] * (8 + 2 * dims["E"] * itemsize),
    test_dims=lambda pick: {"T": pick(1, 7), "V": pick(1, 20), "E": pick(1, 130), "scaled": pick(0, 1)},
    bench_dims={
        "smollm2 decode": {"T": 1, "V": 49152, "E": 576},
        "smollm2 prefill": {"T": 1024, "V": 49152, "E": 576},
        # An eighth of the model's table: all of it in float64, for the check of the result, would take 4 GB.
        "llama-3-8b": {"T": 256, "V": 16032, "E": 4096},
        "gemma-3-1b, a sixteenth of its table": {"T": 256, "V": 16384, "E": 1152, "scaled": 1},
    },
    arrange=_scaled_or_not,
    rows="T",
)
def embedding(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The table's row of each token, scaled.

        y[t, e] = table[token_ids[t], e] * scale

    Args:
        token_ids: [T] int64, each in 0 .. V-1. The caller sees to it: reading them here would stop the device.
        table: [V, E] fp16|bf16|fp32, last dim contiguous.
        scale: factor on the rows, > 0, in fp32; 1 copies them bit for bit.
    Returns: [T, E], dtype of table.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    """
