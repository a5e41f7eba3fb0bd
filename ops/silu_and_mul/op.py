import torch

from vllm_triton.ops.contract import FLOATS, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.silu_and_mul.reference import silu_and_mul_reference


@define_op(
    args={"x": Tensor("T 2*I", FLOATS)},
    results={"out": Tensor("T I", "x")},
    reference=silu_and_mul_reference,
    flops=lambda dims: 5 * dims["T"] * dims["I"],
    test_dims=lambda pick: {"T": pick(1, 7), "I": pick(1, 130)},
    bench_dims={
        "smollm2 decode": {"T": 1, "I": 1536},
        "smollm2 prefill": {"T": 1024, "I": 1536},
        "llama-3-8b": {"T": 256, "I": 14336},
    },
    rows="T",
    inlineable=True,
)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The gated activation of a feed-forward layer: the first half of each row, through SiLU, gates the second.

        y[t, i] = x[t, i] * sigmoid(x[t, i]) * x[t, I + i]

    Args:
        x: [T, 2*I] fp16|bf16|fp32, last dim contiguous.
    Returns: [T, I], dtype of x; computes in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Shazeer, "GLU Variants Improve Transformer", equation 6 (SwiGLU).
    """
