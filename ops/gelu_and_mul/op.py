from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Scalar, Tensor
from vllm_triton.ops.gelu_and_mul.reference import gelu_and_mul_reference
from vllm_triton.ops.registry import define_op


def _either_form(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """The entry "exact" of dims is no size, but asks for the form with the error function."""
    inputs["approximate"] = not dims.get("exact")


@define_op(
    args={
        "x": Tensor("T 2*I", FLOATS),
        "approximate": Scalar(bool, "be True or False", lambda approximate: True, example=True),
    },
    results={"out": Tensor("T I", "x")},
    reference=gelu_and_mul_reference,
    flops=lambda dims: 10 * dims["T"] * dims["I"],
    test_dims=lambda pick: {"T": pick(1, 7), "I": pick(1, 130), "exact": pick(0, 1)},
    bench_dims={
        "gemma-3-1b decode": {"T": 1, "I": 6912},
        "gemma-3-1b prefill": {"T": 256, "I": 6912},
        "gemma-3-1b prefill, exact": {"T": 256, "I": 6912, "exact": 1},
    },
    arrange=_either_form,
    rows="T",
    inlineable=True,
)
def gelu_and_mul(x: torch.Tensor, approximate: bool) -> torch.Tensor:
    """The gated activation of a feed-forward layer: the first half of each row, through GELU, gates the second.

        y[t, i] = gelu(x[t, i]) * x[t, I + i]
        gelu(z) = z * (1 + erf(z / sqrt(2))) / 2                             or, approximately,
        gelu(z) = z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))) / 2

    Args:
        x: [T, 2*I] fp16|bf16|fp32, last dim contiguous.
        approximate: whether by tanh, as Gemma does.
    Returns: [T, I], dtype of x; computes in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2; Shazeer, "GLU Variants Improve Transformer",
        equation 6 (GEGLU).
    """
