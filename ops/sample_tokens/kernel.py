"""Sampling, one program a row: thresholds by quartering, then a draw in two levels; float32 throughout.

The k-th largest logit and the floor of top-p are found without a sort: the bits of a float, read as an integer in the
right order, are halved twice a pass until a floor parts the right tokens, at most 16 passes over the row, and only in
rows that ask. The draw sums the row block by block, finds the block in which the sum passes u * total, and scans that
block alone.

Source: see the op; Philox is Triton's tl.rand.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, block_size, launch, supports_triton
from vllm_triton.ops.sample_tokens import reference
from vllm_triton.ops.sample_tokens.op import sample_tokens

# 16 logits a thread of 8 warps.
LARGEST_BLOCK = 4096
# Blocks that lie below a floor are passed over: of small ones there are more.
LARGEST_CPU_BLOCK = 1024
GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _load_logits(logits_ptr, start, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """A block of the row; minus infinity beyond its end and for NaN, no infinity, no negative zero."""
    tokens = start + tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    logits = tl.minimum(logits, LARGEST_FLOAT)
    return tl.where(logits == 0, 0.0, logits)


@triton.jit
def _key(logits):
    """Integers in the order of the floats."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(logits, peak, temperature, min_p):
    """0 for tokens that min_p drops."""
    weights = tl.exp((logits - peak) / temperature)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def _masses_from(logits_ptr, floors, peak, temperature, min_p, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """For each of ascending floors, the summed weight of the tokens with at least that key, and how many have any."""
    masses = (peak * 0.0, peak * 0.0, peak * 0.0, peak * 0.0)
    counts = (floors[0] * 0, floors[0] * 0, floors[0] * 0, floors[0] * 0)
    for start in range(0, V, BLOCK_V):
        logits = _load_logits(logits_ptr, start, V, BLOCK_V)
        keys = _key(logits)
        if tl.max(keys) >= floors[0]:
            weights = _weights(logits, peak, temperature, min_p)
            first = tl.where(keys >= floors[0], weights, 0.0)
            second = tl.where(keys >= floors[1], weights, 0.0)
            third = tl.where(keys >= floors[2], weights, 0.0)
            fourth = tl.where(keys >= floors[3], weights, 0.0)
            masses = (
                masses[0] + tl.sum(first),
                masses[1] + tl.sum(second),
                masses[2] + tl.sum(third),
                masses[3] + tl.sum(fourth),
            )
            counts = (
                counts[0] + tl.sum((first > 0).to(tl.int32)),
                counts[1] + tl.sum((second > 0).to(tl.int32)),
                counts[2] + tl.sum((third > 0).to(tl.int32)),
                counts[3] + tl.sum((fourth > 0).to(tl.int32)),
            )
    return masses, counts


@triton.jit
def _counts_from(logits_ptr, floors, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """How many tokens have a key of at least each of three floors, which are above that of minus infinity."""
    first, second, third = floors
    counts = (first * 0, first * 0, first * 0)
    for start in range(0, V, BLOCK_V):
        keys = _key(_load_logits(logits_ptr, start, V, BLOCK_V))
        counts = (
            counts[0] + tl.sum((keys >= first).to(tl.int32)),
            counts[1] + tl.sum((keys >= second).to(tl.int32)),
            counts[2] + tl.sum((keys >= third).to(tl.int32)),
        )
    return counts


@triton.jit
def _top_k_floor(logits_ptr, low, high, top_k, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """A key that top_k tokens reach, or the largest that more do, for ties; in int64, where no width overflows."""
    count = top_k + 1  # of the tokens that reach `low`, once that has moved
    while (low < high) & (count != top_k):
        width = high - low
        at = (high - (3 * width >> 2), high - (width >> 1), high - (width >> 2))  # ascending, above low
        floors = (at[0].to(tl.int32), at[1].to(tl.int32), at[2].to(tl.int32))
        counts = _counts_from(logits_ptr, floors, V, BLOCK_V)
        for index in tl.static_range(3):
            enough = counts[index] >= top_k
            low = tl.where(enough, at[index], low)
            count = tl.where(enough, counts[index], count)
            high = tl.where(enough, high, tl.minimum(high, at[index] - 1))
    return low


@triton.jit
def _top_p_floor(logits_ptr, low, high, top_p, peak, temperature, min_p, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """A key that just those tokens reach above which less than top_p of the mass lies that `low` keeps."""
    wanted = peak * 0.0 - 1  # until a pass has found the mass from `low` on
    from_low, above_high = V + low * 0, low * 0  # tokens with weight: at most, and above `high`
    while (low < high) & (from_low - above_high != 1):
        width = high - low
        at = (low - 1, low + (width >> 2), low + (width >> 1), low + (3 * width >> 2))  # ascending, below high
        floors = (
            low.to(tl.int32),
            (at[1] + 1).to(tl.int32),
            (at[2] + 1).to(tl.int32),
            (at[3] + 1).to(tl.int32),
        )
        masses, counts = _masses_from(logits_ptr, floors, peak, temperature, min_p, V, BLOCK_V)
        wanted = tl.where(wanted < 0, top_p * masses[0], wanted)
        from_low = counts[0].to(tl.int64)
        for index in tl.static_range(1, 4):
            is_less = masses[index] < wanted
            is_first = is_less & (at[index] < high)
            high = tl.where(is_first, at[index], high)
            above_high = tl.where(is_first, counts[index], above_high)
            low = tl.where(is_less, low, at[index] + 1)
            from_low = tl.where(is_less, from_low, counts[index])
    return low


@triton.jit
def first_passed(weights, mass_before, wanted, start, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The first token of the block from `start` on at which the running mass passes `wanted`.

    A scan rounds differently from a sum and may end just short of it: then the last token with weight, -1 without any.
    """
    tokens = start + tl.arange(0, BLOCK_V)
    kept = weights > 0
    passed = kept & (mass_before + tl.cumsum(weights, axis=0) > wanted)
    first = tl.min(tl.where(passed, tokens, V))
    return tl.where(first < V, first, tl.max(tl.where(kept, tokens, -1)))


@triton.jit
def _draw(logits_ptr, floor, uniform, peak, temperature, min_p, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The first token at which the running mass of the kept ones passes uniform * total."""
    # The first pass sums the whole row. The second takes blocks with mass up to the one at which the running mass
    # passes; should rounding let none pass, the last block with mass has been taken.
    wanted = peak * 0.0 + float("inf")
    mass = peak * 0.0
    mass_before = mass
    block = floor * 0
    for _ in range(2):
        wanted = tl.where(mass > 0, uniform * mass, wanted)
        mass = peak * 0.0
        for start in range(0, V, BLOCK_V):
            logits = _load_logits(logits_ptr, start, V, BLOCK_V)
            keys = _key(logits)
            if (mass <= wanted) & (tl.max(keys) >= floor):
                here = tl.sum(tl.where(keys >= floor, _weights(logits, peak, temperature, min_p), 0.0))
                taken = mass + here > mass
                block = tl.where(taken, start, block)
                mass_before = tl.where(taken, mass, mass_before)
                mass += here

    logits = _load_logits(logits_ptr, block, V, BLOCK_V)
    weights = tl.where(_key(logits) >= floor, _weights(logits, peak, temperature, min_p), 0.0)
    return first_passed(weights, mass_before, wanted, block, V, BLOCK_V)


@triton.jit(
    do_not_specialize=["logits_stride_b"],
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "min_p_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "seeds_ptr",
        "steps_ptr",
    ],
)
def _sample_tokens_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    min_p_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    tokens_ptr,  # [B]
    logits_stride_b,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """tokens[b] = first v with sum_{i <= v kept} w[i] > u * sum_{i kept} w[i], w = exp((logits - peak) / temperature).

    Source: see the op.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_b
    temperature = tl.load(temperature_ptr + row)
    peak = temperature * 0.0 + float("-inf")
    token = tl.program_id(0) * 0
    for start in range(0, V, BLOCK_V):
        logits = _load_logits(row_ptr, start, V, BLOCK_V)
        block_peak, index = tl.max(logits, axis=0, return_indices=True)
        token = tl.where(block_peak > peak, start + index, token)
        peak = tl.maximum(peak, block_peak)

    if (temperature >= GREEDY_BELOW) & (peak > float("-inf")):
        min_p = tl.load(min_p_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        floor = _key(peak * 0.0 + float("-inf")).to(tl.int64)
        highest = _key(peak).to(tl.int64)
        if (top_k > 0) & (top_k < V):
            floor = _top_k_floor(row_ptr, floor, highest, top_k, V, BLOCK_V)
        if top_p < 1:
            floor = _top_p_floor(row_ptr, floor, highest, top_p, peak, temperature, min_p, V, BLOCK_V)
        uniform = tl.rand(tl.load(seeds_ptr + row), tl.load(steps_ptr + row))
        token = _draw(row_ptr, floor.to(tl.int32), uniform, peak, temperature, min_p, V, BLOCK_V)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@dataclass(frozen=True)
class SampleTokensConfig:
    block_v: int
    num_warps: int


@functools.cache
def select_config(vocabulary: int, device: str) -> SampleTokensConfig:
    block = block_size(vocabulary, LARGEST_CPU_BLOCK if device == "cpu" else LARGEST_BLOCK)
    return SampleTokensConfig(block, num_warps=min(max(block // 512, 1), 8))


COMPILE_CASES = [
    CompileCase(
        _sample_tokens_kernel,
        {
            "logits_ptr": "*fp32",
            "temperature_ptr": "*fp32",
            "min_p_ptr": "*fp32",
            "top_k_ptr": "*i32",
            "top_p_ptr": "*fp32",
            "seeds_ptr": "*i64",
            "steps_ptr": "*i64",
            "tokens_ptr": "*i64",
            "logits_stride_b": "i32",
        },
        {"V": 49152, "BLOCK_V": select_config(49152, "cuda").block_v},
        num_warps=select_config(49152, "cuda").num_warps,
    )
]


@sample_tokens.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    num_rows, vocabulary = logits.shape
    tokens = torch.empty_like(seeds)
    if num_rows == 0:
        return tokens
    config = select_config(vocabulary, logits.device.type)
    launch(
        _sample_tokens_kernel,
        (num_rows,),
        (logits, temperature, min_p, top_k, top_p, seeds, steps, tokens),
        (logits.stride(0),),
        (vocabulary, config.block_v),
        config.num_warps,
    )
    return tokens
