"""Sizes of the tiles that fused_moe computes."""

import functools
from dataclasses import dataclass

from vllm_triton.ops.launch import next_power_of_2
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK


@dataclass(frozen=True)
class FusedMoeConfig:
    """block_t: slots of a block. gate_n, down_n: columns of a tile. depth: of the tiles of both products.

    group: blocks that run through the tiles together.
    """

    block_t: int
    gate_n: int
    down_n: int
    depth: int
    group: int
    num_warps: int
    num_stages: int


def slots_per_expert(num_tokens: int, num_choices: int, num_experts: int) -> int:
    """On average, and the same for all numbers of tokens up to a power of two: kernels differ by no more than that."""
    return next_power_of_2(num_tokens) * num_choices // num_experts


@functools.cache
def select_config(
    num_tokens: int, num_choices: int, num_experts: int, itemsize: int, blocks: bool = False
) -> FusedMoeConfig:
    """Tiles whose loads in flight fit 64 KiB of shared memory, as those of `linear`; the gate and up product have two.

    Args:
        num_tokens: rows of x.
        num_experts: that slots are sorted among.
        itemsize: bytes of an element of the weights.
        blocks: whether scales are of blocks of the weights: no tile is deeper than one.
    """
    average = slots_per_expert(num_tokens, num_choices, num_experts)
    if average <= 16:  # tl.dot has no smaller tile
        depth = min(256 // itemsize, SCALE_BLOCK) if blocks else 256 // itemsize
        return FusedMoeConfig(16, 32, 64, depth, group=1, num_warps=4, num_stages=3)
    if average <= 64:
        return FusedMoeConfig(64, 64, 128, 64 // itemsize, group=2, num_warps=4, num_stages=3)
    return FusedMoeConfig(128, 64, 128, 64 // itemsize, group=8, num_warps=8, num_stages=3)


@functools.cache
def select_cpu_config(
    num_tokens: int, num_choices: int, num_experts: int, depth: int, blocks: bool = False
) -> FusedMoeConfig:
    """Tiles that read whole rows of the weights, in order.

    A block costs what its rows cost, beside arranging the weight for them where it may have more than 32: then twice
    the average leaves few experts a second block, and the tiles are wider. 2048 tokens of Qwen3-30B-A3B run at 0.96 of
    the rate of one product as large, and 512 tokens at 0.93 of that of 128 products of 32 rows (2 cores, AMD EPYC).
    With 32 to 128 slots an expert, int8 runs at 1.7 times the rate of bfloat16, fp8 at 1.0 and in blocks at 0.85.

    Args:
        depth: columns of x.
        blocks: whether scales are of blocks of the weights: no tile is deeper than one.
    """
    average = slots_per_expert(num_tokens, num_choices, num_experts)
    block_t = min(next_power_of_2(num_tokens), 32 if average <= 24 else next_power_of_2(2 * average), 256)
    block_n = 16 if block_t <= 4 else 64 if block_t <= 32 else 128
    deepest = SCALE_BLOCK if blocks else 4096 if block_t <= 32 else 1024
    block_k = min(max(next_power_of_2(depth), 16), deepest)
    group = min(next_power_of_2(average // block_t), 8)
    return FusedMoeConfig(block_t, block_n // 2, block_n, block_k, group, num_warps=1, num_stages=1)
