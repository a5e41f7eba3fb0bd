"""Batches for the property tests and benchmarks of paged attention: block tables, lengths, and poison around them."""

from typing import Any

import torch

from vllm_triton.ops.contract import QUANTIZED, Dims
from vllm_triton.ops.testing.inputs import poison

# What rows of `out` that belong to no query hold before and after.
OUT_POISON = 0.5


def draw_dims(pick: Any) -> Dims:
    """Small ragged batches; names in lower case are no sizes but steer `arrange_batch`."""
    num_kv_heads, num_sequences, num_blocks = pick(1, 2), pick(1, 3), pick(1, 3)
    is_causal = pick.of(1, 1, 1, 0)
    return {
        "Q": pick.of(1, num_kv_heads),
        "softcap": pick.of(0, 0, 2),
        "is_causal": is_causal,
        "sinks": pick(0, 1),
        "quantized": pick.of(0, 0, 1, 2),
        "lse": pick(0, 1),
        "T": pick(1, 40),
        "G": num_kv_heads,
        "H": num_kv_heads * pick.of(1, 3, 4),
        "D": pick.of(16, 24, 80, 96),
        "S": pick.of(16, 32),
        "B": num_sequences,
        "M": num_blocks,
        "P": num_sequences * num_blocks + 1 + pick(0, 2),
        "window": pick.of(0, 1, 7, 40) if is_causal else 0,
        "ragged": 1,
    }


def arrange_batch(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Fills in block table, lengths and window, and poisons what no query may read.

    Without "ragged" in dims, every sequence is full (M * S tokens) and T / B of them are this step's.
    """
    num_sequences, longest = dims["B"], dims["M"] * dims["S"]
    if dims.get("ragged"):
        query_lens, seq_lens = _draw_lengths(num_sequences, dims["T"], longest, generator)
    else:
        query_lens, seq_lens = [min(dims["T"] // num_sequences, longest)] * num_sequences, [longest] * num_sequences
    inputs["window"] = dims.get("window", 0)
    inputs["softcap"] = float(dims.get("softcap", 0))
    inputs["is_causal"] = bool(dims.get("is_causal", 1))
    for name in ("sinks", "lse"):
        if not dims.get(name):
            inputs[name] = None
    quantize_caches(inputs, (None, *QUANTIZED)[dims.get("quantized", 0)], generator)
    blocks = 1 + torch.randperm(dims["P"] - 1, generator=generator)
    fill_batch(inputs, query_lens, seq_lens, blocks)


def quantize_caches(inputs: dict[str, Any], dtype: torch.dtype | None, generator: torch.Generator) -> None:
    """Caches of this dtype with scales in place of those that are there; None leaves them, without scales."""
    for name in ("key", "value"):
        if dtype is None:
            inputs[f"{name}_scale"] = None
            continue
        scale = torch.rand(inputs[f"{name}_scale"].shape, generator=generator) * 0.03 + 0.02
        values = inputs[f"{name}_cache"].float() / scale[:, None]
        inputs[f"{name}_cache"] = (values.round().clamp(-127, 127) if dtype == torch.int8 else values).to(dtype)
        inputs[f"{name}_scale"] = scale


def fill_batch(inputs: dict[str, Any], query_lens: list[int], seq_lens: list[int], blocks: torch.Tensor) -> None:
    """Writes the tensors of a batch whose row b has query_lens[b] new tokens out of seq_lens[b].

    Args:
        blocks: distinct block ids, handed out row by row; every slot that no query sees becomes NaN, and blocks that
            lie wholly before every query's window are given back.
    """
    table, key_cache, window = inputs["block_table"], inputs["key_cache"], inputs["window"]
    slots_per_page = key_cache.shape[1]
    table.zero_()
    owned = torch.zeros(key_cache.shape[:2], dtype=torch.bool)
    handed_out = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first_seen = max(seq_len - query_len - window + 1, 0) if window else 0
        positions = torch.arange(first_seen, seq_len)
        block_indices = (positions // slots_per_page).unique()
        mine = blocks[handed_out : handed_out + len(block_indices)]
        handed_out += len(block_indices)
        table[row, block_indices] = mine.to(table.dtype)
        owned[table[row, positions // slots_per_page].long(), positions % slots_per_page] = True
    for name in ("key_cache", "value_cache"):
        cache = inputs[name]
        poisoned = cache.new_full((), poison(cache.dtype))
        cache.view(torch.int8)[~owned] = poisoned.expand(cache.shape[2:]).contiguous().view(torch.int8)
    inputs["seq_lens"].copy_(torch.tensor(seq_lens))
    inputs["query_start_loc"].copy_(torch.tensor([0, *query_lens]).cumsum(0))
    inputs["out"].fill_(OUT_POISON)
    if inputs.get("lse") is not None:
        inputs["lse"].fill_(OUT_POISON)


def _draw_lengths(
    num_sequences: int, num_tokens: int, longest: int, generator: torch.Generator
) -> tuple[list[int], list[int]]:
    """Padding, decoding, prefilling and chunked rows in any order, together at most `num_tokens` queries."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    query_lens, seq_lens, left = [], [], num_tokens
    for _ in range(num_sequences):
        kind = draw(0, 3) if left else 0
        most = min(left, longest)
        query_len = 0 if kind == 0 else 1 if kind == 1 else draw(1, most)
        context = 0 if kind in (0, 2) else draw(0, longest - query_len)
        query_lens.append(query_len)
        seq_lens.append(query_len + context)
        left -= query_len
    return query_lens, seq_lens
