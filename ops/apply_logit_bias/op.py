from typing import Any

import torch

from vllm_triton.ops.apply_logit_bias.reference import apply_logit_bias_reference
from vllm_triton.ops.contract import Dims, Tensor
from vllm_triton.ops.registry import define_op


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Distinct pairs, some of them padding, some of the biases minus infinity."""
    num_pairs, num_logits = dims["N"], dims["B"] * dims["V"]
    pairs = torch.randperm(num_logits, generator=generator)[:num_pairs]
    inputs["rows"].fill_(-1)
    inputs["rows"][: len(pairs)] = pairs // dims["V"]
    inputs["token_ids"][: len(pairs)] = pairs % dims["V"]
    inputs["rows"][torch.rand(num_pairs, generator=generator) < 0.25] = -1
    inputs["bias"][torch.rand(num_pairs, generator=generator) < 0.25] = float("-inf")


@define_op(
    args={
        "logits": Tensor("B V", (torch.float32,), mutated=True),
        "rows": Tensor("N", (torch.int64,)),
        "token_ids": Tensor("N", (torch.int64,)),
        "bias": Tensor("N", (torch.float32,)),
    },
    reference=apply_logit_bias_reference,
    flops=lambda dims: dims["N"],
    bytes=lambda dims, itemsize: dims["N"] * (3 * itemsize + 16),
    test_dims=lambda pick: {"B": pick(1, 5), "V": pick(1, 130), "N": pick(0, 300)},
    bench_dims={"32 rows of 100": {"B": 32, "V": 49152, "N": 3200}},
    arrange=_arrange,
)
def apply_logit_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Adds a bias to single logits; with minus infinity it forbids tokens.

        logits[rows[n], token_ids[n]] += bias[n]

    Args:
        logits: [B, V] fp32.
        rows: [N] int64, below B; -1 for padding, which writes nothing.
        token_ids: [N] int64, 0 .. V - 1; the pairs (row, token) are distinct.
        bias: [N] fp32, natural-log units.
    Returns: nothing.
    Mutates: logits.
    Raises: ShapeError, DTypeError.
    Source: the `logit_bias` parameter of OpenAI's completions API.
    """
