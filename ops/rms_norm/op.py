from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Scalar, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.rms_norm.reference import rms_norm_reference

EPS = Scalar(float, "be greater than 0", lambda eps: eps > 0, example=1e-5)
# Float32 beside a narrower x where a checkpoint stores weight - 1, as Gemma's do: 1 + weight would be rounded to it.
WEIGHT = Tensor("E", FLOATS)


def arrange_weight(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """The entry "wide_weight" of dims is no size, but asks for a weight in float32."""
    if dims.get("wide_weight"):
        inputs["weight"] = inputs["weight"].float()


@define_op(
    args={"x": Tensor("T H? E", FLOATS), "weight": WEIGHT, "eps": EPS},
    results={"out": Tensor("T H? E", "x")},
    reference=rms_norm_reference,
    flops=lambda dims: 4 * dims["T"] * dims.get("H", 1) * dims["E"],
    test_dims=lambda pick: (
        {"T": pick.of(1, 3, 7, 65), "E": pick(1, 130), "wide_weight": pick(0, 1)} | pick.of({}, {"H": 1}, {"H": 3})
    ),
    bench_dims={
        "smollm2 decode": {"T": 1, "E": 576},
        "smollm2 prefill": {"T": 1024, "E": 576},
        "llama-3-8b": {"T": 256, "E": 4096},
        "gemma-3-1b": {"T": 256, "E": 1152, "wide_weight": 1},
        "qwen3-0.6b query decode": {"T": 1, "H": 16, "E": 128},
        "qwen3-0.6b query prefill": {"T": 512, "H": 16, "E": 128},
    },
    arrange=arrange_weight,
    rows="T",
    inlineable=True,
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square layer normalisation of each row, or of each head of a row.

        y[t, e] = x[t, e] * rsqrt(mean_e x[t, e]^2 + eps) * weight[e]

    Args:
        x: [T, E] fp16|bf16|fp32, last dim contiguous; or [T, H, E], H heads of E elements each, of which a view of a
            fused projection is fine.
        weight: [E] fp16|bf16|fp32.
        eps: added to the mean square, dimensionless, > 0.
    Returns: shape and dtype of x, contiguous; accumulates in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
    """
