import torch

from vllm_triton.ops.contract import FLOATS, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.w4a16_mm.reference import w4a16_mm_reference


def _words(dims: dict[str, int], generator: torch.Generator) -> torch.Tensor:
    shape = (dims["J"], 4 * dims["Q"], 16)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)


@define_op(
    args={
        "x": Tensor("T 32*Q", FLOATS),
        "quants": Tensor("J 4*Q 16", (torch.int32,), values=_words),
        "scales": Tensor("J Q 16", (torch.float16,)),
        "minima": Tensor("J Q 16", (torch.float16,)),
    },
    results={"out": Tensor("T 16*J", "x")},
    reference=w4a16_mm_reference,
    flops=lambda dims: 2 * dims["T"] * 16 * dims["J"] * 32 * dims["Q"],
    test_dims=lambda pick: {"T": pick.of(1, 2, 7, 17, 40), "J": pick(1, 9), "Q": pick(1, 5)},
    bench_dims={
        "smollm2 gate_up decode": {"T": 1, "J": 192, "Q": 18},
        "smollm2 head decode": {"T": 1, "J": 3072, "Q": 18},
        "smollm2 gate_up 16 sequences": {"T": 16, "J": 192, "Q": 18},
        "llama-3-8b qkv decode": {"T": 1, "J": 384, "Q": 128},
        "llama-3-8b gate_up decode": {"T": 1, "J": 1792, "Q": 128},
    },
    rows="T",
    uses_dot=True,
)
def w4a16_mm(x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """A dense projection by a weight of 4-bit values, which blocks of 32 along a row share a scale and a minimum for.

        y[t, n] = sum_k x[t, k] * (scale[n, k // 32] * q[n, k] + minimum[n, k // 32])

    `layout.pack` arranges such a weight: 16 rows lie interleaved, so that lanes are rows and a row's scale needs no
    broadcast. 20 bytes hold 32 values, as in GGUF's Q4_1.

    Args:
        x: [T, 32*Q] fp16|bf16|fp32, last dim contiguous.
        quants: [J, 4*Q, 16] int32: word [j, w, r] holds q of row 16*j + r at inputs 8*w to 8*w + 7, lowest bits first.
        scales: [J, Q, 16] fp16: [j, b, r] is the scale of row 16*j + r in block b.
        minima: [J, Q, 16] fp16, likewise.
    Returns: [T, 16*J], dtype of x; accumulates in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    """
