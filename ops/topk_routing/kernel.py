"""Routing, one program for each token, which holds a rank for every expert in float32.

The best of the ranks is taken and struck out, K times; a group's rank is found in the same way. What may still be taken
ranks at least LOWEST, what may not -inf.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.1.2.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, next_power_of_2, supports_triton
from vllm_triton.ops.topk_routing.op import topk_routing

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _best(ranks, indices, NONE: tl.constexpr):
    """(The highest rank, the lowest index that has it); NONE is above all indices."""
    highest = tl.max(ranks, axis=0)
    return highest, tl.min(tl.where(ranks == highest, indices, NONE), axis=0)


@triton.jit
def _without_lesser_groups(
    ranks,
    experts,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SUMS_TWO: tl.constexpr,
):
    """The ranks, -inf outside of the best groups."""
    BLOCK_X: tl.constexpr = ranks.shape[0]
    groups = tl.arange(0, BLOCK_G)
    group_ranks = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    for group in range(NUM_GROUPS):
        within = tl.where(experts // GROUP_SIZE == group, ranks, float("-inf"))
        group_rank, first = _best(within, experts, BLOCK_X)
        if SUMS_TWO:
            group_rank += tl.max(tl.where(experts == first, float("-inf"), within), axis=0)
        # The sum of two that are LOWEST must not look like a group that was taken.
        group_ranks = tl.where(groups == group, tl.maximum(group_rank, LOWEST), group_ranks)
    is_kept = tl.zeros([BLOCK_X], dtype=tl.int32)
    for _ in range(TOPK_GROUPS):
        _, group = _best(group_ranks, groups, BLOCK_G)
        is_kept = tl.where(experts // GROUP_SIZE == group, 1, is_kept)
        group_ranks = tl.where(groups == group, float("-inf"), group_ranks)
    return tl.where(is_kept != 0, ranks, float("-inf"))


@triton.jit(do_not_specialize=["logits_stride_t"])
def _topk_routing_kernel(
    logits_ptr,  # [T, X]
    bias_ptr,  # [X], or None
    weights_ptr,  # [T, K], contiguous
    ids_ptr,  # [T, K], contiguous
    scaling_factor: tl.float32,
    logits_stride_t,
    X: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_X)
    is_expert = experts < X
    logits_ptrs = logits_ptr + row * logits_stride_t + experts
    logits = tl.load(logits_ptrs, mask=is_expert, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    if USE_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp2(logits * -LOG2_E))
    else:
        highest = tl.max(logits, axis=0)
        # -inf minus -inf must not become NaN.
        scores = tl.exp2((logits - tl.where(highest == float("-inf"), 0.0, highest)) * LOG2_E)
        mass = tl.sum(scores, axis=0)
        scores = scores / tl.where(mass > 0, mass, 1.0)
    if bias_ptr is None:
        ranks = logits
    else:
        ranks = scores + tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
        ranks = tl.where(ranks == ranks, ranks, float("-inf"))
    ranks = tl.where(is_expert, tl.maximum(ranks, LOWEST), float("-inf"))
    if TOPK_GROUPS < NUM_GROUPS:
        group_size: tl.constexpr = X // NUM_GROUPS
        sums_two: tl.constexpr = bias_ptr is not None and group_size > 1
        ranks = _without_lesser_groups(ranks, experts, group_size, NUM_GROUPS, TOPK_GROUPS, BLOCK_G, sums_two)

    places = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], dtype=tl.float32)
    ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    for place in range(K):
        _, expert = _best(ranks, experts, BLOCK_X)
        is_taken = experts == expert
        weights = tl.where(places == place, tl.sum(tl.where(is_taken, scores, 0.0), axis=0), weights)
        ids = tl.where(places == place, expert, ids)
        ranks = tl.where(is_taken, float("-inf"), ranks)
    if RENORMALIZE:
        total = tl.sum(weights, axis=0)
        weights = weights / tl.where(total > 0, total, 1.0)
    tl.store(weights_ptr + row * K + places, weights * scaling_factor, mask=places < K)
    tl.store(ids_ptr + row * K + places, ids, mask=places < K)


@dataclass(frozen=True)
class TopkRoutingConfig:
    block_x: int
    block_k: int
    block_g: int
    num_warps: int


@functools.cache
def select_config(num_experts: int, num_choices: int, num_groups: int) -> TopkRoutingConfig:
    """A warp reduces 128 ranks without the others."""
    block_x = next_power_of_2(num_experts)
    blocks = (block_x, next_power_of_2(num_choices), next_power_of_2(num_groups))
    return TopkRoutingConfig(*blocks, num_warps=1 if block_x <= 128 else 2)


def _compile_case(num_experts: int, num_choices: int, num_groups: int, topk_groups: int, has_bias: bool) -> CompileCase:
    config = select_config(num_experts, num_choices, num_groups)
    return CompileCase(
        _topk_routing_kernel,
        {
            "logits_ptr": "*bf16",
            "weights_ptr": "*fp32",
            "ids_ptr": "*i32",
            "scaling_factor": "fp32",
            "logits_stride_t": "i32",
        }
        | ({"bias_ptr": "*fp32"} if has_bias else {}),
        {
            "X": num_experts,
            "K": num_choices,
            "NUM_GROUPS": num_groups,
            "TOPK_GROUPS": topk_groups,
            "USE_SIGMOID": has_bias,
            "RENORMALIZE": True,
            "BLOCK_X": config.block_x,
            "BLOCK_K": config.block_k,
            "BLOCK_G": config.block_g,
        }
        | ({} if has_bias else {"bias_ptr": None}),
        config.num_warps,
    )


COMPILE_CASES = [
    _compile_case(128, 8, num_groups=1, topk_groups=1, has_bias=False),
    _compile_case(256, 8, num_groups=8, topk_groups=4, has_bias=True),
]


@topk_routing.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_topk_routing(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_choices: int,
    use_sigmoid: bool,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = router_logits.shape
    weights = router_logits.new_empty(num_tokens, num_choices, dtype=torch.float32)
    ids = router_logits.new_empty(num_tokens, num_choices, dtype=torch.int32)
    if num_tokens == 0:
        return weights, ids
    config = select_config(num_experts, num_choices, num_groups)
    kind = (num_experts, num_choices, num_groups, topk_groups, use_sigmoid, renormalize)
    launch(
        _topk_routing_kernel,
        (num_tokens,),
        (router_logits, correction_bias, weights, ids),
        (scaling_factor, router_logits.stride(0)),
        (*kind, config.block_x, config.block_k, config.block_g),
        config.num_warps,
    )
    return weights, ids
