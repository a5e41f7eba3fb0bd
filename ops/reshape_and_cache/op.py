from collections.abc import Mapping
from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, QUANTIZED, Dims, Tensor
from vllm_triton.ops.paged_attention.op import why_not_cache
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.reshape_and_cache.reference import reshape_and_cache_reference


def _slots(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """Distinct slots; PADDING tokens, and those beyond the cache's size, have none."""
    num_tokens = dims["T"]
    slots = torch.randperm(dims["P"] * dims["S"], generator=generator)[:num_tokens]
    slots = torch.nn.functional.pad(slots, (0, num_tokens - slots.shape[0]), value=-1)
    slots[torch.randperm(num_tokens, generator=generator)[: dims.get("PADDING", 0)]] = -1
    return slots


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Caches of the dtype that dims["quantized"] counts, 0 for that of key."""
    if not dims.get("quantized"):
        inputs["key_scale"] = inputs["value_scale"] = None
        return
    for name in ("key", "value"):
        # Small enough that a few values leave the range.
        inputs[f"{name}_scale"] = torch.rand(dims["Q"], generator=generator) * 0.01 + 0.003
        inputs[f"{name}_cache"] = inputs[f"{name}_cache"].to(QUANTIZED[dims["quantized"] - 1])


def _constraint(dims: Dims) -> str | None:
    if dims.get("Q", 1) not in (1, dims["G"]):
        return f"key_scale must have 1 element or G = {dims['G']}, got {dims['Q']}"
    return None


def _combination(arguments: Mapping[str, Any]) -> str | None:
    return why_not_cache(arguments, "key")


def _test_dims(pick: Any) -> Dims:
    pages, slots = pick(1, 3), pick.of(1, 4, 16)
    sizes = {"T": pick(1, 8), "P": pages, "S": slots, "G": pick(1, 3), "D": pick.of(1, 8, 63, 64)}
    return sizes | {"PADDING": pick(0, 3), "Q": pick.of(1, sizes["G"]), "quantized": pick(0, 2)}


@define_op(
    args={
        "key": Tensor("T G D", FLOATS),
        "value": Tensor("T G D", "key"),
        "key_cache": Tensor("P S G D", FLOATS + QUANTIZED, mutated=True),
        "value_cache": Tensor("P S G D", "key_cache", mutated=True),
        "slot_mapping": Tensor("T", (torch.int64,), values=_slots),
        "key_scale": Tensor("Q", (torch.float32,), optional=True),
        "value_scale": Tensor("Q", (torch.float32,), optional=True),
    },
    constraint=_constraint,
    combination=_combination,
    arrange=_arrange,
    reference=reshape_and_cache_reference,
    # Of the caches, only the slots that are named are written.
    bytes=lambda dims, itemsize: dims["T"] * (8 + 4 * dims["G"] * dims["D"] * itemsize),
    test_dims=_test_dims,
    bench_dims={
        "smollm2 decode": {"T": 1, "P": 512, "S": 16, "G": 3, "D": 64, "Q": 1},
        "smollm2 prefill": {"T": 1024, "P": 512, "S": 16, "G": 3, "D": 64, "Q": 1},
        "llama-3-8b": {"T": 256, "P": 512, "S": 16, "G": 8, "D": 128, "Q": 1},
    },
    uses_kv_cache=True,
)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Writes each token's key and value into its slot of the paged cache.

        key_cache[slot // S, slot % S] = key[t];  value_cache likewise      slot = slot_mapping[t]

    A quantized cache gets key[t, g] / key_scale[g] instead, cut to what its dtype can hold (fp8 e4m3: 448 either way;
    int8: 127) and rounded to the nearest, ties to even.

    Args:
        key: [T, G, D] fp16|bf16|fp32, last dim contiguous; a view of a fused projection is fine.
        value: [T, G, D], likewise, dtype of key.
        key_cache: [P, S, G, D], dtype of key or a quantized one (fp8 e4m3, int8), last dim contiguous; its other
            strides are free.
        value_cache: [P, S, G, D], likewise.
        slot_mapping: [T] int64, distinct slots in 0 .. P*S-1, or -1 for a padding token, which writes nothing. The
            caller sees to it: reading them here would stop the device.
        key_scale, value_scale: [1] or [G] fp32 above 0, for a quantized cache.
    Returns: nothing.
    Mutates: key_cache, value_cache.
    Raises: ShapeError, DTypeError.
    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", section 4.
    """
