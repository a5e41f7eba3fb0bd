"""Experts as grouped products: slots, which are choices of tokens, are sorted into blocks of one expert each.

    gate_up[s, n]    = sum_e w1[p, n, e] * x[s // K, e] + w1_bias[p, n]
    activation[s, i] = silu(gate_up[s, i]) * gate_up[s, I + i], or that of gpt-oss
    result[s, e]     = topk_weights[s] * (sum_i w2[p, e, i] * activation[s, i] + w2_bias[p, e])

for each slot s whose expert lies at p, and then the sum over the slots of a token. A program holds one tile of a block:
of the gate and of the up product at once, so that activations alone are stored. Products and sums in float32. How many
blocks there are is known on the device alone: there are programs for as many as there can be; those without a block
return.

Source: Gale, Narayanan, Young and Zaharia, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts".
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.fused_moe.op import fused_moe
from vllm_triton.ops.fused_moe.reference import SWIGLU_ALPHA
from vllm_triton.ops.launch import CompileCase, ceil_div, launch, next_power_of_2, rows_aligned, supports_triton
from vllm_triton.ops.moe_align_block_size.kernel import launch_moe_align_block_size
from vllm_triton.ops.moe_sum.kernel import launch_moe_sum

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_SWIGLU_ALPHA = tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def _block_and_tile(program, num_blocks, num_tiles, GROUP: tl.constexpr):
    """Blocks in groups, tile by tile: blocks of one expert follow each other on the same tile of its weight."""
    first = program // (GROUP * num_tiles) * GROUP
    group_size = min(num_blocks - first, GROUP)
    within = program % (GROUP * num_tiles)
    return first + within % group_size, within // group_size


@triton.jit
def _row_offsets(rows, stride, ALIGNED: tl.constexpr):
    offsets = rows.to(tl.int64) * stride
    if ALIGNED:
        offsets = tl.multiple_of(offsets, 16)
    return offsets


@triton.jit
def _swiglu(gate, up, LIMIT: tl.constexpr):
    """silu_and_mul, or with a limit the activation of gpt-oss."""
    if LIMIT == 0:
        return gate / (1.0 + tl.exp2(gate * MINUS_LOG2_E)) * up
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp2(gate * (_SWIGLU_ALPHA * MINUS_LOG2_E))) * (up + 1.0)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "x_stride_t"])
def _gate_up_kernel(
    x_ptr,  # [T, E]
    w1_ptr,  # [X, 2 * I, E]
    w1_bias_ptr,  # [X, 2 * I], or None
    sorted_slots_ptr,  # [Z * BLOCK_T]
    block_experts_ptr,  # [Z]
    activation_ptr,  # [T * K, I], contiguous
    num_slots,
    num_blocks,
    x_stride_t,
    w1_stride_x,
    w1_stride_n,
    w1_bias_stride_x,
    I,  # noqa: E741  (the glossary's name)
    E,
    LIMIT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block, tile = _block_and_tile(tl.program_id(0), num_blocks, tl.cdiv(I, BLOCK_N), GROUP)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    slots = tl.load(sorted_slots_ptr + block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))
    # Rows of the gate's and the up projection's weight by turns: one product gives both, side by side.
    pairs = tile * BLOCK_N + tl.arange(0, 2 * BLOCK_N) // 2
    weight_rows = pairs + tl.arange(0, 2 * BLOCK_N) % 2 * I
    lanes = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + _row_offsets(slots // K, x_stride_t, ALIGNED)[:, None] + lanes[None, :]
    weight_offsets = _row_offsets(expert, w1_stride_x, ALIGNED) + _row_offsets(weight_rows, w1_stride_n, ALIGNED)
    weight_ptrs = w1_ptr + weight_offsets[None, :] + lanes[:, None]
    total = tl.zeros([BLOCK_T, 2 * BLOCK_N], dtype=tl.float32)
    for start in range(0, E, BLOCK_K):
        inside = lanes < E - start
        x = tl.load(x_ptrs + start, mask=(slots < num_slots)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=(pairs < I)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if w1_bias_ptr is not None:
        bias_ptrs = w1_bias_ptr + _row_offsets(expert, w1_bias_stride_x, False) + weight_rows
        total += tl.load(bias_ptrs, mask=pairs < I, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(total, [BLOCK_T, BLOCK_N, 2]))
    activation = _swiglu(gate, up, LIMIT)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = activation_ptr + (slots.to(tl.int64) * I)[:, None] + columns[None, :]
    tl.store(out_ptrs, activation, mask=(slots < num_slots)[:, None] & (columns < I)[None, :])


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "weights_stride_t"])
def _down_kernel(
    activation_ptr,  # [T * K, I], contiguous
    w2_ptr,  # [X, E, I]
    w2_bias_ptr,  # [X, E], or None
    topk_weights_ptr,  # [T, K]
    sorted_slots_ptr,  # [Z * BLOCK_T]
    block_experts_ptr,  # [Z]
    result_ptr,  # [T * K, E], contiguous
    num_slots,
    num_blocks,
    weights_stride_t,
    w2_stride_x,
    w2_stride_n,
    w2_bias_stride_x,
    I,  # noqa: E741  (the glossary's name)
    E,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    block, tile = _block_and_tile(tl.program_id(0), num_blocks, tl.cdiv(E, BLOCK_N), GROUP)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    slots = tl.load(sorted_slots_ptr + block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))
    is_slot = slots < num_slots
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    activation_ptrs = activation_ptr + _row_offsets(slots, I, ALIGNED)[:, None] + lanes[None, :]
    weight_offsets = _row_offsets(expert, w2_stride_x, ALIGNED) + _row_offsets(columns, w2_stride_n, ALIGNED)
    weight_ptrs = w2_ptr + weight_offsets[None, :] + lanes[:, None]
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for start in range(0, I, BLOCK_K):
        inside = lanes < I - start
        activation = tl.load(activation_ptrs + start, mask=is_slot[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=(columns < E)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(activation, weight, total, input_precision="ieee")
    if w2_bias_ptr is not None:
        bias_ptrs = w2_bias_ptr + _row_offsets(expert, w2_bias_stride_x, False) + columns
        total += tl.load(bias_ptrs, mask=columns < E, other=0.0).to(tl.float32)[None, :]
    routing_ptrs = topk_weights_ptr + _row_offsets(slots // K, weights_stride_t, False) + slots % K
    routing = tl.load(routing_ptrs, mask=is_slot, other=0.0)
    out_ptrs = result_ptr + (slots.to(tl.int64) * E)[:, None] + columns[None, :]
    tl.store(out_ptrs, total * routing[:, None], mask=is_slot[:, None] & (columns < E)[None, :])


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


def _slots_per_expert(num_tokens: int, num_choices: int, num_experts: int) -> int:
    """On average, and the same for all numbers of tokens up to a power of two: kernels differ by no more than that."""
    return next_power_of_2(num_tokens) * num_choices // num_experts


@functools.cache
def select_config(num_tokens: int, num_choices: int, num_experts: int, itemsize: int) -> FusedMoeConfig:
    """Tiles whose loads in flight fit 64 KiB of shared memory, as those of `linear`; the gate and up product have two.

    Args:
        num_tokens: rows of x.
        num_experts: that slots are sorted among.
        itemsize: bytes of an element of x.
    """
    average = _slots_per_expert(num_tokens, num_choices, num_experts)
    if average <= 16:  # tl.dot has no smaller tile
        return FusedMoeConfig(16, 32, 64, 256 // itemsize, group=1, num_warps=4, num_stages=3)
    if average <= 64:
        return FusedMoeConfig(64, 64, 128, 64 // itemsize, group=2, num_warps=4, num_stages=3)
    return FusedMoeConfig(128, 64, 128, 64 // itemsize, group=8, num_warps=8, num_stages=3)


@functools.cache
def select_cpu_config(num_tokens: int, num_choices: int, num_experts: int, depth: int) -> FusedMoeConfig:
    """Tiles that read whole rows of the weights, in order.

    A block costs what its rows cost, beside arranging the weight for them where it may have more than 32: then twice
    the average leaves few experts a second block, and the tiles are wider. 2048 tokens of Qwen3-30B-A3B run at 0.96 of
    the rate of one product as large, and 512 tokens at 0.93 of that of 128 products of 32 rows (2 cores, AMD EPYC).

    Args: depth: columns of x.
    """
    average = _slots_per_expert(num_tokens, num_choices, num_experts)
    block_t = min(next_power_of_2(num_tokens), 32 if average <= 24 else next_power_of_2(2 * average), 256)
    block_n = 16 if block_t <= 4 else 64 if block_t <= 32 else 128
    block_k = min(max(next_power_of_2(depth), 16), 4096 if block_t <= 32 else 1024)
    group = min(next_power_of_2(average // block_t), 8)
    return FusedMoeConfig(block_t, block_n // 2, block_n, block_k, group, num_warps=1, num_stages=1)


def _compile_cases(num_tokens: int, limit: float = 0.0) -> list[CompileCase]:
    """Args: limit: swiglu_limit; a model that has one has biases too."""
    config = select_config(num_tokens, 8, 128, torch.bfloat16.itemsize)
    table = {"sorted_slots_ptr": "*i32", "block_experts_ptr": "*i32"}
    names = ["num_slots", "num_blocks", "I", "E"]
    tiles = {"K": 8, "BLOCK_T": config.block_t, "BLOCK_K": config.depth, "GROUP": config.group, "ALIGNED": True}
    w1_bias, w2_bias = ({name: "*bf16"} if limit else {} for name in ("w1_bias_ptr", "w2_bias_ptr"))
    no_w1_bias, no_w2_bias = ({} if limit else {name: None} for name in ("w1_bias_ptr", "w2_bias_ptr"))
    return [
        CompileCase(
            _gate_up_kernel,
            {"x_ptr": "*bf16", "w1_ptr": "*bf16", "activation_ptr": "*bf16"}
            | w1_bias
            | table
            | dict.fromkeys([*names, "x_stride_t", "w1_stride_x", "w1_stride_n", "w1_bias_stride_x"], "i32"),
            tiles | {"BLOCK_N": config.gate_n, "LIMIT": limit} | no_w1_bias,
            config.num_warps,
            config.num_stages,
        ),
        CompileCase(
            _down_kernel,
            {"activation_ptr": "*bf16", "w2_ptr": "*bf16", "topk_weights_ptr": "*fp32", "result_ptr": "*bf16"}
            | w2_bias
            | table
            | dict.fromkeys([*names, "weights_stride_t", "w2_stride_x", "w2_stride_n", "w2_bias_stride_x"], "i32"),
            tiles | {"BLOCK_N": config.down_n} | no_w2_bias,
            config.num_warps,
            config.num_stages,
        ),
    ]


COMPILE_CASES = [case for kind in ((1,), (512,), (8192,), (1, 7.0), (512, 7.0)) for case in _compile_cases(*kind)]


@fused_moe.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_fused_moe(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> torch.Tensor:
    num_tokens, hidden_size = x.shape
    num_choices, intermediate_size = topk_ids.shape[1], w2.shape[2]
    num_experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    num_slots = num_tokens * num_choices
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cpu:
        config = select_cpu_config(num_tokens, num_choices, num_experts, hidden_size)
    else:
        config = select_config(num_tokens, num_choices, num_experts, x.element_size())
    sorted_slots, block_experts, _ = launch_moe_align_block_size(topk_ids, expert_map, num_experts, config.block_t)
    num_blocks = block_experts.shape[0]
    activation = x.new_empty(num_slots, intermediate_size)
    w1_strides, w2_strides = (
        (*weight.stride()[:2], 0 if bias is None else bias.stride(0)) for weight, bias in ((w1, w1_bias), (w2, w2_bias))
    )
    tile = (num_choices, config.block_t)
    launch(
        _gate_up_kernel,
        (num_blocks * ceil_div(intermediate_size, config.gate_n),),
        (x, w1, w1_bias, sorted_slots, block_experts, activation),
        (num_slots, num_blocks, x.stride(0), *w1_strides, intermediate_size, hidden_size),
        (float(swiglu_limit), *tile, config.gate_n, config.depth, config.group, rows_aligned(x, w1)),
        config.num_warps,
        config.num_stages,
    )
    result = x.new_empty(num_tokens, num_choices, hidden_size)
    launch(
        _down_kernel,
        (num_blocks * ceil_div(hidden_size, config.down_n),),
        (activation, w2, w2_bias, topk_weights, sorted_slots, block_experts, result),
        (num_slots, num_blocks, topk_weights.stride(0), *w2_strides, intermediate_size, hidden_size),
        (*tile, config.down_n, config.depth, config.group, rows_aligned(activation, w2)),
        config.num_warps,
        config.num_stages,
    )
    return launch_moe_sum(result, topk_ids, expert_map)
