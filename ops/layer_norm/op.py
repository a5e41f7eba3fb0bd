from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.layer_norm.reference import layer_norm_reference
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.rms_norm.op import EPS


def _with_or_without_bias(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """The entry "biased" of dims is no size, but asks for a bias."""
    if not dims.get("biased"):
        inputs["bias"] = None


@define_op(
    args={
        "x": Tensor("T E", FLOATS),
        "weight": Tensor("E", "x"),
        "bias": Tensor("E", "x", optional=True),
        "eps": EPS,
    },
    results={"out": Tensor("T E", "x")},
    reference=layer_norm_reference,
    flops=lambda dims: 7 * dims["T"] * dims["E"],
    # One column is 0 but for rounding, of which an exact 0 allows none.
    test_dims=lambda pick: {"T": pick(1, 7), "E": pick(2, 130), "biased": pick(0, 1)},
    bench_dims={
        "phi-2 decode": {"T": 1, "E": 2560, "biased": 1},
        "phi-2 prefill": {"T": 256, "E": 2560, "biased": 1},
        "command-r": {"T": 256, "E": 8192},
    },
    arrange=_with_or_without_bias,
    rows="T",
    inlineable=True,
)
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer normalisation of each row.

        m[t] = mean_e x[t, e];  v[t] = mean_e (x[t, e] - m[t])^2
        y[t, e] = (x[t, e] - m[t]) * rsqrt(v[t] + eps) * weight[e] + bias[e]

    Args:
        x: [T, E] fp16|bf16|fp32, last dim contiguous.
        weight: [E], dtype of x.
        bias: [E], dtype of x, or None.
        eps: added to the variance, dimensionless, > 0.
    Returns: [T, E], dtype of x; accumulates in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Ba, Kiros and Hinton, "Layer Normalization", equation 4.
    """
