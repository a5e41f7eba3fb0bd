import torch

from vllm_triton.ops.contract import FLOATS, Scalar, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.rms_norm.reference import rms_norm_reference

EPS = Scalar(float, "be greater than 0", lambda eps: eps > 0, example=1e-5)


@define_op(
    args={"x": Tensor("T E", FLOATS), "weight": Tensor("E", "x"), "eps": EPS},
    results={"out": Tensor("T E", "x")},
    reference=rms_norm_reference,
    flops=lambda dims: 4 * dims["T"] * dims["E"],
    test_dims=lambda pick: {"T": pick.of(1, 3, 7, 65), "E": pick(1, 130)},
    bench_dims={
        "smollm2 decode": {"T": 1, "E": 576},
        "smollm2 prefill": {"T": 1024, "E": 576},
        "llama-3-8b": {"T": 256, "E": 4096},
    },
    rows="T",
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square layer normalisation of each row.

        y[t, e] = x[t, e] * rsqrt(mean_e x[t, e]^2 + eps) * weight[e]

    Args:
        x: [T, E] fp16|bf16|fp32, last dim contiguous.
        weight: [E], dtype of x.
        eps: added to the mean square, dimensionless, > 0.
    Returns: [T, E], dtype of x; accumulates in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4.
    """
