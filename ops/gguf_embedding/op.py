import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.gguf_embedding.reference import gguf_embedding_reference
from vllm_triton.ops.gguf_mm.layout import FORMATS
from vllm_triton.ops.gguf_mm.op import packed_dims, random_scales, random_words, unfitting
from vllm_triton.ops.registry import define_op


def _token_ids(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(32 * dims["J"], (dims["T"],), generator=generator)


def _bytes(dims: Dims, itemsize: int) -> int:
    """Only the rows that are named are read."""
    return dims["T"] * (8 + 4 * dims["W"] + 2 * dims["S"] + dims["K"] * itemsize)


@define_op(
    args={
        "out": Tensor("T K", FLOATS, mutated=True),
        "token_ids": Tensor("T", (torch.int64,), values=_token_ids),
        "quants": Tensor("J W 32", (torch.int32,), values=random_words),
        "scales": Tensor("J S 32", (torch.int16,), values=random_scales),
    },
    reference=gguf_embedding_reference,
    constraint=unfitting,
    bytes=_bytes,
    test_dims=lambda pick: packed_dims(pick.of(*FORMATS), 256 * pick(1, 2), T=pick(1, 7), J=pick(1, 3)),
    bench_dims={
        "smollm2 decode": packed_dims("Q8_0", 576, T=1, J=1536),
        "smollm2 prefill": packed_dims("Q8_0", 576, T=1024, J=1536),
        "llama-3-8b": packed_dims("Q4_K", 4096, T=256, J=4008),
    },
    rows="T",
)
def gguf_embedding(out: torch.Tensor, token_ids: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor) -> None:
    """The row of each token in a table that stays packed as a GGUF file has it, see `gguf_mm`.

        out[t, k] = table[token_ids[t], k]

    Args:
        out: [T, K] fp16|bf16|fp32, last dim contiguous.
        token_ids: [T] int64, each in 0 .. 32*J-1. The caller sees to it: reading them here would stop the device.
        quants: [J, W, 32] int32.
        scales: [J, S, 32] int16.
    Mutates: out.
    Raises: ShapeError, DTypeError.
    """
