"""Experts as grouped products, as in fused_moe, by tiles of their weights that are unpacked as in w4a16_mm.

Blocks of one or two slots take the way of w4a16_mm's kernel for few tokens: a CPU, which has such blocks where experts
have few slots, reads a weight twice in less time than it unpacks it once. Others take tiles. Sizes are multiples of 32,
and tiles divide them: neither rows nor inputs of a weight are masked.
"""

import functools
import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from vllm_triton.ops.fused_moe.config import FusedMoeConfig, select_config, select_cpu_config, slots_per_expert
from vllm_triton.ops.fused_moe.product import row_offsets
from vllm_triton.ops.fused_moe.tiles import block_and_tile, slots_of_block, store_activation, store_result
from vllm_triton.ops.fused_moe_w4a16.op import fused_moe_w4a16
from vllm_triton.ops.launch import CompileCase, launch, rows_aligned, supports_triton
from vllm_triton.ops.moe_align_block_size.kernel import launch_moe_align_block_size
from vllm_triton.ops.moe_sum.kernel import launch_moe_sum
from vllm_triton.ops.w4a16_mm.kernel import FEW_TOKENS, product_of_few, unpacked

# Blocks of as many slots at most take w4a16_mm's way with as few tokens.
_FEW_TOKENS = tl.constexpr(FEW_TOKENS)
# On a CPU, where an expert has as many slots on average at most: relative to tiles for all of its slots, 2 take 0.5, 4
# take 0.8 and 8 take 1.2 (Qwen3-30B-A3B, two cores of an AMD EPYC).
MOST_SLOTS_OF_FEW = 4
# Inputs of a tile at most.
MOST_INPUTS = {"cpu": 256}
MOST_GPU_INPUTS = 128
_STRIDES = [
    f"{name}_stride_{axis}" for name, axes in (("quants", "xjw"), ("scales", "xjs"), ("zeros", "xjs")) for axis in axes
]


@triton.jit
def _rows(
    ptr, expert, first_group, stride_x, stride_j, BLOCK_N: tl.constexpr, IS_FEW: tl.constexpr, ALIGNED: tl.constexpr
):
    """Where rows of an expert's operand begin, from those of a group of 16 on: [BLOCK_N], or [BLOCK_N / 16, 16]."""
    if IS_FEW:
        groups = first_group + tl.arange(0, BLOCK_N // 16)
        offsets = row_offsets(groups, stride_j, ALIGNED)[:, None] + tl.arange(0, 16)[None, :]
    else:
        lanes = tl.arange(0, BLOCK_N)
        offsets = row_offsets(first_group + lanes // 16, stride_j, ALIGNED) + lanes % 16
    return ptr + row_offsets(expert, stride_x, ALIGNED) + offsets


@triton.jit
def _product(
    a_ptrs,  # [BLOCK_T]: rows of the left operand
    a_mask,  # [BLOCK_T]
    quants_ptr,
    scales_ptr,
    zeros_ptr,
    expert,
    first_group,  # of 16 rows
    quants_stride_x,
    quants_stride_j,
    quants_stride_w,
    scales_stride_x,
    scales_stride_j,
    scales_stride_s,
    zeros_stride_x,
    zeros_stride_j,
    zeros_stride_s,
    Q,
    S,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """[BLOCK_T, BLOCK_N], float32."""
    IS_FEW: tl.constexpr = a_ptrs.shape[0] <= _FEW_TOKENS
    quants_ptrs = _rows(quants_ptr, expert, first_group, quants_stride_x, quants_stride_j, BLOCK_N, IS_FEW, ALIGNED)
    scales_ptrs = _rows(scales_ptr, expert, first_group, scales_stride_x, scales_stride_j, BLOCK_N, IS_FEW, ALIGNED)
    zeros_ptrs = zeros_ptr
    if zeros_ptr is not None:
        zeros_ptrs = _rows(zeros_ptr, expert, first_group, zeros_stride_x, zeros_stride_j, BLOCK_N, IS_FEW, ALIGNED)
    if IS_FEW:
        few = product_of_few(
            a_ptrs[:, None],
            a_mask[:, None],
            None,
            quants_ptrs,
            scales_ptrs,
            zeros_ptrs,
            quants_stride_w,
            scales_stride_s,
            zeros_stride_s,
            Q,
            S,
        )
        total = tl.reshape(few, [a_ptrs.shape[0], BLOCK_N])
    else:
        a_ptrs = a_ptrs[:, None] + tl.arange(0, BLOCK_K)[None, :]
        total = tl.zeros([a_ptrs.shape[0], BLOCK_N], dtype=tl.float32)
        for start in range(0, 32 * Q, BLOCK_K):
            a = tl.load(a_ptrs + start, mask=a_mask[:, None], other=0.0)
            weight = unpacked(
                quants_ptrs,
                scales_ptrs,
                zeros_ptrs,
                start,
                Q // S,
                quants_stride_w,
                scales_stride_s,
                zeros_stride_s,
                BLOCK_K,
                a.dtype,
            )
            total = tl.dot(a, weight, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "x_stride_t", *_STRIDES, "I", "Q", "S"])
def _gate_up_kernel(
    x_ptr,  # [T, 32 * Q]
    quants_ptr,  # [X, I / 8, 4 * Q, 16]
    scales_ptr,  # [X, I / 8, S, 16]
    zeros_ptr,  # [X, I / 8, S, 16], or None
    sorted_slots_ptr,  # [Z * BLOCK_T]
    block_experts_ptr,  # [Z]
    activation_ptr,  # [T * K, I], contiguous
    num_slots,
    num_blocks,
    x_stride_t,
    quants_stride_x,
    quants_stride_j,
    quants_stride_w,
    scales_stride_x,
    scales_stride_j,
    scales_stride_s,
    zeros_stride_x,
    zeros_stride_j,
    zeros_stride_s,
    I,  # noqa: E741  (the glossary's name)
    Q,
    S,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides I
    BLOCK_K: tl.constexpr,  # divides 32 * Q
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block, tile = block_and_tile(tl.program_id(0), num_blocks, I // BLOCK_N, GROUP)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    slots = slots_of_block(sorted_slots_ptr, block, BLOCK_T)
    is_slot = slots < num_slots
    gate_up = _product(
        x_ptr + row_offsets(slots // K, x_stride_t, ALIGNED),
        is_slot,
        quants_ptr,
        scales_ptr,
        zeros_ptr,
        expert,
        tile * (2 * BLOCK_N // 16),
        quants_stride_x,
        quants_stride_j,
        quants_stride_w,
        scales_stride_x,
        scales_stride_j,
        scales_stride_s,
        zeros_stride_x,
        zeros_stride_j,
        zeros_stride_s,
        Q,
        S,
        2 * BLOCK_N,
        BLOCK_K,
        ALIGNED,
    )
    store_activation(activation_ptr, gate_up, slots, is_slot, tile, I, 0.0)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "weights_stride_t", *_STRIDES, "E", "Q", "S"])
def _down_kernel(
    activation_ptr,  # [T * K, 32 * Q], contiguous
    quants_ptr,  # [X, E / 16, 4 * Q, 16]
    scales_ptr,  # [X, E / 16, S, 16]
    zeros_ptr,  # [X, E / 16, S, 16], or None
    topk_weights_ptr,  # [T, K]
    sorted_slots_ptr,  # [Z * BLOCK_T]
    block_experts_ptr,  # [Z]
    result_ptr,  # [T * K, E], contiguous
    num_slots,
    num_blocks,
    weights_stride_t,
    quants_stride_x,
    quants_stride_j,
    quants_stride_w,
    scales_stride_x,
    scales_stride_j,
    scales_stride_s,
    zeros_stride_x,
    zeros_stride_j,
    zeros_stride_s,
    E,
    Q,
    S,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides E
    BLOCK_K: tl.constexpr,  # divides 32 * Q
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block, tile = block_and_tile(tl.program_id(0), num_blocks, E // BLOCK_N, GROUP)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    slots = slots_of_block(sorted_slots_ptr, block, BLOCK_T)
    is_slot = slots < num_slots
    total = _product(
        activation_ptr + row_offsets(slots, 32 * Q, ALIGNED),
        is_slot,
        quants_ptr,
        scales_ptr,
        zeros_ptr,
        expert,
        tile * (BLOCK_N // 16),
        quants_stride_x,
        quants_stride_j,
        quants_stride_w,
        scales_stride_x,
        scales_stride_j,
        scales_stride_s,
        zeros_stride_x,
        zeros_stride_j,
        zeros_stride_s,
        Q,
        S,
        BLOCK_N,
        BLOCK_K,
        ALIGNED,
    )
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    store_result(result_ptr, topk_weights_ptr, weights_stride_t, total, slots, is_slot, columns, E, K)


@functools.cache
def select_packed_config(
    num_tokens: int, num_choices: int, num_experts: int, hidden: int, middle: int, device: str
) -> FusedMoeConfig:
    """Tiles of fused_moe, as far as they divide the sizes.

    Args:
        num_tokens: rows of x.
        num_experts: that slots are sorted among.
        hidden, middle: inputs of the first and of the second product.
        device: "cpu", or the device type of a GPU.
    """
    if device == "cpu":
        config = select_cpu_config(num_tokens, num_choices, num_experts, hidden)
        if slots_per_expert(num_tokens, num_choices, num_experts) <= MOST_SLOTS_OF_FEW:
            config = replace(config, block_t=min(config.block_t, FEW_TOKENS))
    else:
        config = select_config(num_tokens, num_choices, num_experts, 2)
    depth = math.gcd(hidden, middle, MOST_INPUTS.get(device, MOST_GPU_INPUTS), config.depth)
    return replace(config, gate_n=math.gcd(middle, config.gate_n), down_n=math.gcd(hidden, config.down_n), depth=depth)


def _compile_cases(num_tokens: int, has_zeros: bool) -> list[CompileCase]:
    config = select_packed_config(num_tokens, 8, 128, 2048, 768, "cuda")
    tiles = {"K": 8, "BLOCK_T": config.block_t, "BLOCK_K": config.depth, "GROUP": config.group, "ALIGNED": True}
    types = {"quants_ptr": "*i32", "scales_ptr": "*fp16", "sorted_slots_ptr": "*i32", "block_experts_ptr": "*i32"}
    absent: dict[str, None] = {}
    if has_zeros:
        types["zeros_ptr"] = "*fp16"
    else:
        absent["zeros_ptr"] = None
    result = {"activation_ptr": "*bf16", "topk_weights_ptr": "*fp32", "result_ptr": "*bf16"}
    cases = []
    for kernel, pointers, block_n in (
        (_gate_up_kernel, {"x_ptr": "*bf16", "activation_ptr": "*bf16"}, config.gate_n),
        (_down_kernel, result, config.down_n),
    ):
        constants = tiles | absent | {"BLOCK_N": block_n}
        given = types | pointers
        numbers = [name for name in kernel.arg_names if name not in given | constants]
        signature = given | dict.fromkeys(numbers, "i32")
        cases.append(CompileCase(kernel, signature, constants, config.num_warps, config.num_stages))
    return cases


COMPILE_CASES = [
    case
    for num_tokens in (1, 512, 8192)
    for has_zeros in (False, True)
    for case in _compile_cases(num_tokens, has_zeros)
]


@fused_moe_w4a16.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_fused_moe_w4a16(
    x: torch.Tensor,
    w1_quants: torch.Tensor,
    w1_scales: torch.Tensor,
    w1_zeros: torch.Tensor | None,
    w2_quants: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_zeros: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, hidden = x.shape
    num_choices, middle = topk_ids.shape[1], 8 * w2_quants.shape[2]
    num_experts = w1_quants.shape[0] if expert_map is None else expert_map.shape[0]
    num_slots = num_tokens * num_choices
    if num_tokens == 0:
        return torch.empty_like(x)
    config = select_packed_config(num_tokens, num_choices, num_experts, hidden, middle, x.device.type)
    sorted_slots, block_experts, _ = launch_moe_align_block_size(topk_ids, expert_map, num_experts, config.block_t)
    num_blocks = block_experts.shape[0]
    activation = x.new_empty(num_slots, middle)
    launch(
        _gate_up_kernel,
        (num_blocks * (middle // config.gate_n),),
        (x, w1_quants, w1_scales, w1_zeros, sorted_slots, block_experts, activation),
        (
            *(num_slots, num_blocks, x.stride(0), *_strides(w1_quants, w1_scales, w1_zeros)),
            *(middle, hidden // 32, w1_scales.shape[2]),
        ),
        (
            *(num_choices, config.block_t, config.gate_n, config.depth, config.group),
            _are_aligned(x, w1_quants, w1_scales, w1_zeros),
        ),
        config.num_warps,
        config.num_stages,
    )
    result = x.new_empty(num_tokens, num_choices, hidden)
    launch(
        _down_kernel,
        (num_blocks * (hidden // config.down_n),),
        (activation, w2_quants, w2_scales, w2_zeros, topk_weights, sorted_slots, block_experts, result),
        (
            *(num_slots, num_blocks, topk_weights.stride(0), *_strides(w2_quants, w2_scales, w2_zeros)),
            *(hidden, middle // 32, w2_scales.shape[2]),
        ),
        (
            *(num_choices, config.block_t, config.down_n, config.depth, config.group),
            _are_aligned(activation, w2_quants, w2_scales, w2_zeros),
        ),
        config.num_warps,
        config.num_stages,
    )
    return launch_moe_sum(result, topk_ids, expert_map)


def _strides(quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> tuple[int, ...]:
    """Of experts, groups of rows, and words or groups of inputs."""
    return *quants.stride()[:3], *scales.stride()[:3], *((0, 0, 0) if zeros is None else zeros.stride()[:3])


def _are_aligned(x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> bool:
    return rows_aligned(*(each for each in (x, quants, scales, zeros) if each is not None))
