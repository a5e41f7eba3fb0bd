import math

import torch

from vllm_triton.ops.contract import FLOATS, Scalar, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.softcap_logits.reference import softcap_logits_reference


@define_op(
    args={
        "logits": Tensor("B V", FLOATS),
        "softcap": Scalar(float, "be finite and greater than 0", lambda softcap: 0 < softcap < math.inf, example=1.5),
    },
    results={"out": Tensor("B V", "logits")},
    reference=softcap_logits_reference,
    flops=lambda dims: 6 * dims["B"] * dims["V"],
    test_dims=lambda pick: {"B": pick(1, 7), "V": pick(1, 130)},
    bench_dims={"gemma-2-2b": {"B": 1, "V": 256000}, "gemma-2-2b 16 sequences": {"B": 16, "V": 256000}},
    rows="B",
    inlineable=True,
)
def softcap_logits(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Bends logits so that none leaves (-softcap, softcap), and small ones stay as they are.

        y[b, v] = softcap * tanh(logits[b, v] / softcap)

    Args:
        logits: [B, V] fp16|bf16|fp32, last dim contiguous.
        softcap: the bound, > 0.
    Returns: [B, V], dtype of logits; computes in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
    """
