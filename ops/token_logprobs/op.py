from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.token_logprobs.reference import token_logprobs_reference


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Any tokens; some logits minus infinity, some equal, none of the tokens' own forbidden."""
    logits = inputs["logits"]
    logits.mul_(4).round_().div_(2)
    inputs["token_ids"].copy_(torch.randint(0, dims["V"], (dims["B"],), generator=generator))
    forbidden = torch.rand(logits.shape, generator=generator) < 0.2
    logits.masked_fill_(forbidden.scatter(1, inputs["token_ids"][:, None], False), float("-inf"))


_FLOAT = (torch.float32,)


@define_op(
    args={"logits": Tensor("B V", FLOATS), "token_ids": Tensor("B", (torch.int64,))},
    results={
        "logprobs": Tensor("B", _FLOAT),
        "ranks": Tensor("B", (torch.int64,)),
        "lse": Tensor("B", _FLOAT),
    },
    reference=token_logprobs_reference,
    flops=lambda dims: 4 * dims["B"] * dims["V"],
    test_dims=lambda pick: {"B": pick(1, 5), "V": pick(1, 130)},
    bench_dims={"32 rows": {"B": 32, "V": 49152}, "qwen3, 32 rows": {"B": 32, "V": 151936}},
    arrange=_arrange,
    rows="B",
)
def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability and rank of one token a row, in one pass over the vocabulary.

        lse[b] = log sum_v exp(logits[b, v])        logprobs[b] = logits[b, token_ids[b]] - lse[b]
        ranks[b] = 1 + how many logits of the row are greater than the token's

    The log-probability of any other token is its logit minus lse.

    Args:
        logits: [B, V] fp16, bf16 or fp32, last dim contiguous; of each row at least one is finite, none is NaN.
        token_ids: [B] int64, 0 .. V - 1.
    Returns: logprobs [B] fp32, ranks [B] int64, lse [B] fp32; computes in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax".
    """
