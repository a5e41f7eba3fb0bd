import torch

from vllm_triton.ops.contract import FLOATS, Tensor
from vllm_triton.ops.linear.reference import linear_reference
from vllm_triton.ops.registry import define_op


@define_op(
    args={
        "x": Tensor("T K", FLOATS),
        "weight": Tensor("N K", "x"),
        "bias": Tensor("N", "x", optional=True),
    },
    results={"out": Tensor("T N", "x")},
    reference=linear_reference,
    flops=lambda dims: 2 * dims["T"] * dims["N"] * dims["K"],
    test_dims=lambda pick: {"T": pick.of(1, 2, 7, 17, 63, 130), "N": pick(1, 130), "K": pick(1, 130)},
    bench_dims={
        "smollm2 qkv decode": {"T": 1, "N": 960, "K": 576},
        "smollm2 gate_up decode": {"T": 1, "N": 3072, "K": 576},
        "smollm2 down decode": {"T": 1, "N": 576, "K": 1536},
        "smollm2 head decode": {"T": 1, "N": 49152, "K": 576},
        "smollm2 gate_up 8 sequences": {"T": 8, "N": 3072, "K": 576},
        "smollm2 gate_up prefill": {"T": 1024, "N": 3072, "K": 576},
        "llama-3-8b qkv decode": {"T": 1, "N": 6144, "K": 4096},
        "llama-3-8b qkv 4 sequences": {"T": 4, "N": 6144, "K": 4096},
        "llama-3-8b qkv 32 sequences": {"T": 32, "N": 6144, "K": 4096},
        "llama-3-8b qkv 256 tokens": {"T": 256, "N": 6144, "K": 4096},
        "llama-3-8b down 16 sequences": {"T": 16, "N": 4096, "K": 14336},
    },
    rows="T",
    uses_dot=True,
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A dense projection of each row.

        y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]

    Args:
        x: [T, K] fp16|bf16|fp32, last dim contiguous.
        weight: [N, K], dtype of x.
        bias: [N], dtype of x, or None.
    Returns: [T, N], dtype of x; accumulates in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    """
