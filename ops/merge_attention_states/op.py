import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.merge_attention_states.reference import merge_attention_states_reference
from vllm_triton.ops.registry import define_op


def _lse(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """Sums of unlike sizes, and of nothing at all."""
    lse = 3 * torch.randn(dims["T"], dims["H"], generator=generator)
    return lse.masked_fill(torch.rand(lse.shape, generator=generator) < 0.2, float("-inf"))


@define_op(
    args={
        "out": Tensor("T H D", FLOATS, mutated=True),
        "first": Tensor("T H D", "out"),
        "first_lse": Tensor("T H", (torch.float32,), values=_lse),
        "second": Tensor("T H D", "out"),
        "second_lse": Tensor("T H", (torch.float32,), values=_lse),
        "lse": Tensor("T H", (torch.float32,), optional=True, mutated=True),
    },
    reference=merge_attention_states_reference,
    flops=lambda dims: 3 * dims["T"] * dims["H"] * dims["D"],
    bytes=lambda dims, itemsize: dims["T"] * dims["H"] * (3 * dims["D"] * itemsize + 12),
    test_dims=lambda pick: {"T": pick(1, 7), "H": pick(1, 9), "D": pick.of(1, 16, 64, 80)},
    bench_dims={
        "smollm2 decode, 32": {"T": 32, "H": 9, "D": 64},
        "llama-3-8b, 512": {"T": 512, "H": 32, "D": 128},
    },
    rows="T",
)
def merge_attention_states(
    out: torch.Tensor,
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention over two sets of keys from the attention over each.

        out = (e^first_lse first + e^second_lse second) / (e^first_lse + e^second_lse)
        lse = log(e^first_lse + e^second_lse)                                            for each token and head

    Args:
        out: [T, H, D] fp16|bf16|fp32, written.
        first, second: [T, H, D], dtype of out, results of paged_attention; not read where their lse is -inf.
        first_lse, second_lse: [T, H] fp32, the lse of paged_attention; -inf for a query that saw no key of the set.
            Where both are, out is zero.
        lse: [T, H] fp32, written if given.
    Returns: nothing; computes in fp32.
    Mutates: out, lse.
    Raises: ShapeError, DTypeError.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax".
    """
