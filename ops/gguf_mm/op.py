import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.gguf_mm.layout import FORMATS, format_of
from vllm_triton.ops.gguf_mm.reference import gguf_mm_reference
from vllm_triton.ops.registry import define_op


def packed_dims(name: str, depth: int, **dims: int) -> Dims:
    """The sizes of a weight of this format for so many inputs, and others."""
    blocks = depth // FORMATS[name].block
    return {"K": depth, "W": blocks * FORMATS[name].words, "S": blocks * FORMATS[name].scales, **dims}


def random_words(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    shape = (dims["J"], dims["W"], 32)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int()


def random_scales(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """As files have them: fp16 numbers, and bytes, of which 6 bits are used where they are unsigned.

    Small enough that float16 holds all results.
    """
    layout = format_of(dims["K"], dims["W"], dims["S"])
    assert layout is not None, "the dims of a test fit a format"
    scales = (torch.randn(dims["J"], dims["S"], 32, generator=generator) / 256).half().view(torch.int16)
    bytes_ = torch.randint(-(2**15), 2**15, scales.shape, generator=generator).short()
    if layout.name == "Q4_K":
        bytes_ &= 0x3F3F
    of_block = torch.arange(dims["S"]) % layout.scales
    return torch.where((of_block < layout.floats)[:, None], scales, bytes_)


def unfitting(dims: Dims) -> str | None:
    """Why weight and inputs do not fit together, or None."""
    if format_of(dims["K"], dims["W"], dims["S"]) is not None:
        return None
    known = (packed_dims(name, 256) for name in FORMATS)
    each = ", ".join(f"{it['W']} and {it['S']} ({name})" for name, it in zip(FORMATS, known, strict=True))
    return (
        f"quants and scales must have one of these numbers of words and scales for each 256 inputs: {each}; "
        f"got {dims['W']} and {dims['S']} for {dims['K']} inputs"
    )


@define_op(
    args={
        "x": Tensor("T K", FLOATS),
        "quants": Tensor("J W 32", (torch.int32,), values=random_words),
        "scales": Tensor("J S 32", (torch.int16,), values=random_scales),
        "bias": Tensor("32*J", "x", optional=True),
    },
    results={"out": Tensor("T 32*J", "x")},
    reference=gguf_mm_reference,
    constraint=unfitting,
    flops=lambda dims: 2 * dims["T"] * 32 * dims["J"] * dims["K"],
    test_dims=lambda pick: packed_dims(pick.of(*FORMATS), 256 * pick(1, 2), T=pick.of(1, 2, 7, 17, 40), J=pick(1, 5)),
    bench_dims={
        f"{shape} {name}": packed_dims(name, depth, T=num_tokens, J=num_rows // 32)
        for shape, num_tokens, num_rows, depth, names in (
            ("smollm2 qkv decode", 1, 960, 576, ["Q4_1"]),
            ("smollm2 gate_up decode", 1, 3072, 576, ["Q4_1"]),
            ("smollm2 down decode", 1, 576, 1536, ["Q4_1"]),
            ("smollm2 head decode", 1, 49152, 576, ["Q8_0"]),
            ("smollm2 gate_up 4 sequences", 4, 3072, 576, ["Q4_1"]),
            ("smollm2 gate_up 32 sequences", 32, 3072, 576, ["Q4_1"]),
            ("smollm2 gate_up prefill", 1024, 3072, 576, ["Q4_1"]),
            ("llama-3-8b qkv decode", 1, 6144, 4096, list(FORMATS)),
            ("llama-3-8b qkv 32 sequences", 32, 6144, 4096, ["Q4_K"]),
        )
        for name in names
    },
    rows="T",
    uses_dot=True,
)
def gguf_mm(x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A dense projection by a weight that stays packed as a GGUF file has it.

        y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]

    `layout.pack` arranges such a weight, of type Q4_0, Q4_1, Q8_0, Q4_K or Q6_K; which it is shows in how many words
    and scales it has. Rows of zeros fill up the last group of 32.

    Args:
        x: [T, K] fp16|bf16|fp32, last dim contiguous.
        quants: [J, W, 32] int32: [j, :, r] are the values of row 32*j + r, see `layout`.
        scales: [J, S, 32] int16: [j, :, r] are the bits of the scales of row 32*j + r.
        bias: [32*J], dtype of x, or None.
    Returns: [T, 32*J], dtype of x; accumulates in fp32. For many tokens the weight's values are rounded to the dtype
        of x, as those of a weight that is not packed are.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    """
