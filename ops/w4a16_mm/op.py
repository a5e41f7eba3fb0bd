from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.w4a16_mm.layout import BLOCK, LARGEST_ZERO, ROWS
from vllm_triton.ops.w4a16_mm.reference import w4a16_mm_reference


def packed_dims(num_tokens: int, num_rows: int, depth: int, group_size: int, **kind: int) -> Dims:
    """The sizes of a product by a weight [num_rows, depth].

    Args:
        group_size: inputs that share a scale; -1 for all.
        kind: 1 for each of zeros, order and bias that is there; scales: place of their dtype among FLOATS, from 1 on.
    """
    num_groups = 1 if group_size == -1 else depth // group_size
    return {"T": num_tokens, "J": num_rows // ROWS, "Q": depth // BLOCK, "S": num_groups, **kind}


def _constraint(dims: Dims) -> str | None:
    if not dims["Q"]:
        return "x must have one block of 32 columns at least, got 0"
    if not dims["S"] or dims["Q"] % dims["S"]:
        return (
            f"scales must have a number of groups, size S, that divides the {dims['Q']} blocks of 32 inputs, "
            f"got {dims['S']}"
        )
    return None


def _words(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    shape = (dims["J"], 4 * dims["Q"], 16)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)


def _zeros(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, LARGEST_ZERO + 1, (dims["J"], dims["S"], 16), generator=generator)


def _order(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(32 * dims["Q"], generator=generator)


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """See `packed_dims`; by default scales are fp16, as checkpoints have them, and the others are missing."""
    for name in ("zeros", "order", "bias"):
        if not dims.get(name):
            inputs[name] = None
    for name in ("scales", "zeros"):
        if inputs[name] is not None:
            inputs[name] = inputs[name].to(FLOATS[dims.get("scales", 1) - 1])


def _test_dims(pick: Any) -> Dims:
    num_groups = pick(1, 3)
    kind = {"zeros": pick(0, 1), "order": pick(0, 1), "bias": pick(0, 1), "scales": pick(1, len(FLOATS))}
    return {"T": pick.of(1, 2, 7, 17, 40), "J": pick(1, 9), "Q": num_groups * pick(1, 5), "S": num_groups, **kind}


@define_op(
    args={
        "x": Tensor("T 32*Q", FLOATS),
        "quants": Tensor("J 4*Q 16", (torch.int32,), values=_words),
        "scales": Tensor("J S 16", FLOATS),
        "zeros": Tensor("J S 16", "scales", optional=True, values=_zeros),
        "order": Tensor("32*Q", (torch.int32,), optional=True, values=_order),
        "bias": Tensor("16*J", "x", optional=True),
    },
    results={"out": Tensor("T 16*J", "x")},
    reference=w4a16_mm_reference,
    constraint=_constraint,
    arrange=_arrange,
    flops=lambda dims: 2 * dims["T"] * 16 * dims["J"] * 32 * dims["Q"],
    test_dims=_test_dims,
    bench_dims={
        "smollm2 gate_up decode": packed_dims(1, 3072, 576, 32, zeros=1),
        "smollm2 head decode": packed_dims(1, 49152, 576, 32, zeros=1),
        "smollm2 gate_up 4 sequences": packed_dims(4, 3072, 576, 32, zeros=1),
        "smollm2 gate_up 16 sequences": packed_dims(16, 3072, 576, 32, zeros=1),
        "smollm2 gate_up prefill": packed_dims(1024, 3072, 576, 32, zeros=1),
        "llama-3-8b qkv decode": packed_dims(1, 6144, 4096, 128, zeros=1),
        "llama-3-8b qkv symmetric decode": packed_dims(1, 6144, 4096, 128),
        "llama-3-8b qkv act-order decode": packed_dims(1, 6144, 4096, 128, order=1),
        "llama-3-8b qkv 4 sequences": packed_dims(4, 6144, 4096, 128, zeros=1),
        "llama-3-8b qkv 32 sequences": packed_dims(32, 6144, 4096, 128, zeros=1),
        "llama-3-8b qkv act-order 32 sequences": packed_dims(32, 6144, 4096, 128, order=1),
        "llama-3-8b qkv 256 tokens": packed_dims(256, 6144, 4096, 128, zeros=1),
        "llama-3-8b gate_up decode": packed_dims(1, 28672, 4096, 128, zeros=1),
    },
    rows="T",
    uses_dot=True,
)
def w4a16_mm(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A dense projection by a weight of 4-bit values, whose rows have a scale and a zero for each group of inputs.

        y[t, n] = sum_k x[t, order[k]] * scale[n, g(k)] * (q[n, k] - zero[n, g(k)]) + bias[n]

    where g(k) = k // (32*Q/S). `layout.pack` arranges such a weight: 16 rows lie interleaved, so that lanes are rows
    and a row's scale needs no broadcast. `checkpoints` reads what AWQ, GPTQ and compressed-tensors store.

    Args:
        x: [T, 32*Q] fp16|bf16|fp32, last dim contiguous.
        quants: [J, 4*Q, 16] int32: word [j, w, r] holds q of row 16*j + r at inputs 8*w to 8*w + 7, lowest bits first.
        scales: [J, S, 16] fp16|bf16|fp32: [j, s, r] is the scale of row 16*j + r in group s. S divides Q.
        zeros: [J, S, 16], dtype of scales: integers from 0 to 16, likewise; None stands for 8.
        order: [32*Q] int32: the column of x that meets each column of the weight, or None for the same. A weight whose
            groups are not of neighbours (GPTQ's act-order) has its columns sorted by group, and order undoes it.
        bias: [16*J], dtype of x, or None.
    Returns: [T, 16*J], dtype of x; accumulates in fp32. For several tokens the weight's values are rounded to the dtype
        of x, as those of a weight that is not packed are.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Lin et al., "AWQ", section 2; Frantar et al., "GPTQ", section 4 (groups and the order of columns).
    """
