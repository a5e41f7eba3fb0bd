import torch

from vllm_triton.ops.contract import FLOATS, Tensor
from vllm_triton.ops.fused_add_rms_norm.reference import fused_add_rms_norm_reference
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.rms_norm.op import EPS, WEIGHT, arrange_weight


@define_op(
    args={
        "x": Tensor("T E", FLOATS),
        "residual": Tensor("T E", "x"),
        "weight": WEIGHT,
        "eps": EPS,
    },
    results={"out": Tensor("T E", "x"), "residual_out": Tensor("T E", "x")},
    reference=fused_add_rms_norm_reference,
    flops=lambda dims: 5 * dims["T"] * dims["E"],
    test_dims=lambda pick: {"T": pick(1, 7), "E": pick(1, 130), "wide_weight": pick(0, 1)},
    bench_dims={
        "smollm2 decode": {"T": 1, "E": 576},
        "smollm2 prefill": {"T": 1024, "E": 576},
        "llama-3-8b": {"T": 256, "E": 4096},
        "gemma-3-1b": {"T": 256, "E": 1152, "wide_weight": 1},
    },
    arrange=arrange_weight,
    rows="T",
    inlineable=True,
)
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a layer's output to the residual stream and normalises the sum for the next layer.

        s[t, e] = x[t, e] + residual[t, e], rounded to the dtype of x
        y[t, e] = s[t, e] * rsqrt(mean_e s[t, e]^2 + eps) * weight[e]

    The rounded sum is normalised, so that the result equals that of an addition followed by `rms_norm`.

    Args:
        x: [T, E] fp16|bf16|fp32, last dim contiguous.
        residual: [T, E], dtype of x.
        weight: [E] fp16|bf16|fp32.
        eps: added to the mean square, dimensionless, > 0.
    Returns: (y, s), each [T, E] and of the dtype of x; accumulates in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
    """
