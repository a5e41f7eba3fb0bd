import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.embedding.reference import embedding_reference
from vllm_triton.ops.registry import define_op


def _token_ids(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(dims["V"], (dims["T"],), generator=generator)


@define_op(
    args={
        "token_ids": Tensor("T", (torch.int64,), values=_token_ids),
        "table": Tensor("V E", FLOATS),
    },
    results={"out": Tensor("T E", "table")},
    reference=embedding_reference,
    # Only the rows that are named are read.
    bytes=lambda dims, itemsize: dims["T"] * (8 + 2 * dims["E"] * itemsize),
    test_dims=lambda pick: {"T": pick(1, 7), "V": pick(1, 20), "E": pick(1, 130)},
    bench_dims={
        "smollm2 decode": {"T": 1, "V": 49152, "E": 576},
        "smollm2 prefill": {"T": 1024, "V": 49152, "E": 576},
        # An eighth of the model's table: all of it in float64, for the check of the result, would take 4 GB.
        "llama-3-8b": {"T": 256, "V": 16032, "E": 4096},
    },
    rows="T",
)
def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The table's row of each token.

        y[t, e] = table[token_ids[t], e]

    Args:
        token_ids: [T] int64, each in 0 .. V-1. The caller sees to it: reading them here would stop the device.
        table: [V, E] fp16|bf16|fp32, last dim contiguous.
    Returns: [T, E], dtype of table.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    """
