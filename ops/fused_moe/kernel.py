"""Experts as grouped products: slots, which are choices of tokens, are sorted into blocks of one expert each.

    gate_up[s, n]    = sum_e w1[p, n, e] * x[s // K, e] + w1_bias[p, n]
    activation[s, i] = silu(gate_up[s, i]) * gate_up[s, I + i], or that of gpt-oss
    result[s, e]     = topk_weights[s] * (sum_i w2[p, e, i] * activation[s, i] + w2_bias[p, e])

for each slot s whose expert lies at p, and then the sum over the slots of a token. A program holds one tile of a block:
of the gate and of the up product at once, so that activations alone are stored. Products and sums in float32, of int8
in int32. How many blocks there are is known on the device alone: there are programs for as many as there can be; those
without a block return.

Where weights are quantised, so are x before the first product, once for all its slots, and the activations before the
second, each by a launch of scaled_quant.

Source: Gale, Narayanan, Young and Zaharia, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts".
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.fused_moe.config import select_config, select_cpu_config
from vllm_triton.ops.fused_moe.op import fused_moe
from vllm_triton.ops.fused_moe.product import expert_scales, product, row_offsets
from vllm_triton.ops.fused_moe.reference import has_blocks, scale_group
from vllm_triton.ops.fused_moe.tiles import block_and_tile, slots_of_block, store_activation, store_result
from vllm_triton.ops.launch import WITHOUT_FP8, CompileCase, ceil_div, launch, rows_aligned, supports_weights
from vllm_triton.ops.moe_align_block_size.kernel import launch_moe_align_block_size
from vllm_triton.ops.moe_sum.kernel import launch_moe_sum
from vllm_triton.ops.scaled_quant.kernel import launch_scaled_quant


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "x_stride_t", "x_scale_stride_t"])
def _gate_up_kernel(
    x_ptr,  # [T, E]
    x_scale_ptr,  # [T, Q], [1] with a stride of 0, or None
    w1_ptr,  # [X, 2 * I, E]
    w1_scale_ptr,  # [X, 2 * I, 1], of blocks [X, 2 * ceil(I / 128), Q], or None
    w1_bias_ptr,  # [X, 2 * I], or None
    sorted_slots_ptr,  # [Z * BLOCK_T]
    block_experts_ptr,  # [Z]
    activation_ptr,  # [T * K, I], contiguous
    num_slots,
    num_blocks,
    x_stride_t,
    x_scale_stride_t,
    w1_stride_x,
    w1_stride_n,
    w1_scale_stride_x,
    w1_scale_stride_n,
    w1_bias_stride_x,
    I,  # noqa: E741  (the glossary's name)
    E,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    block, tile = block_and_tile(tl.program_id(0), num_blocks, tl.cdiv(I, BLOCK_N), GROUP)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    slots = slots_of_block(sorted_slots_ptr, block, BLOCK_T)
    is_slot = slots < num_slots
    # Rows of the gate's and the up projection's weight by turns: one product gives both, side by side.
    pairs = tile * BLOCK_N + tl.arange(0, 2 * BLOCK_N) // 2
    halves = tl.arange(0, 2 * BLOCK_N) % 2
    weight_rows = pairs + halves * I
    if w1_scale_ptr is not None:
        x_scale_ptrs = x_scale_ptr + row_offsets(slots // K, x_scale_stride_t, False)
        w1_scale_ptrs = expert_scales(
            w1_scale_ptr, expert, halves, pairs, I, w1_scale_stride_x, w1_scale_stride_n, HAS_BLOCKS
        )
    else:
        x_scale_ptrs = None
        w1_scale_ptrs = None
    weight_offsets = row_offsets(expert, w1_stride_x, ALIGNED) + row_offsets(weight_rows, w1_stride_n, ALIGNED)
    total = product(
        x_ptr + row_offsets(slots // K, x_stride_t, ALIGNED),
        is_slot,
        x_scale_ptrs,
        w1_ptr + weight_offsets,
        pairs < I,
        w1_scale_ptrs,
        E,
        BLOCK_K,
        HAS_BLOCKS,
    )
    if w1_bias_ptr is not None:
        bias_ptrs = w1_bias_ptr + row_offsets(expert, w1_bias_stride_x, False) + weight_rows
        total += tl.load(bias_ptrs, mask=pairs < I, other=0.0).to(tl.float32)[None, :]
    store_activation(activation_ptr, total, slots, is_slot, tile, I, LIMIT)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "activation_scale_stride", "weights_stride_t"])
def _down_kernel(
    activation_ptr,  # [T * K, I], contiguous
    activation_scale_ptr,  # [T * K, Q], [1] with a stride of 0, or None
    w2_ptr,  # [X, E, I]
    w2_scale_ptr,  # [X, E, 1], of blocks [X, ceil(E / 128), Q], or None
    w2_bias_ptr,  # [X, E], or None
    topk_weights_ptr,  # [T, K]
    sorted_slots_ptr,  # [Z * BLOCK_T]
    block_experts_ptr,  # [Z]
    result_ptr,  # [T * K, E], contiguous
    num_slots,
    num_blocks,
    activation_scale_stride,
    weights_stride_t,
    w2_stride_x,
    w2_stride_n,
    w2_scale_stride_x,
    w2_scale_stride_n,
    w2_bias_stride_x,
    I,  # noqa: E741  (the glossary's name)
    E,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
):
    block, tile = block_and_tile(tl.program_id(0), num_blocks, tl.cdiv(E, BLOCK_N), GROUP)
    expert = tl.load(block_experts_ptr + block)
    if expert < 0:
        return
    slots = slots_of_block(sorted_slots_ptr, block, BLOCK_T)
    is_slot = slots < num_slots
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if w2_scale_ptr is not None:
        activation_scale_ptrs = activation_scale_ptr + row_offsets(slots, activation_scale_stride, False)
        w2_scale_ptrs = expert_scales(
            w2_scale_ptr, expert, 0, columns, E, w2_scale_stride_x, w2_scale_stride_n, HAS_BLOCKS
        )
    else:
        activation_scale_ptrs = None
        w2_scale_ptrs = None
    weight_offsets = row_offsets(expert, w2_stride_x, ALIGNED) + row_offsets(columns, w2_stride_n, ALIGNED)
    total = product(
        activation_ptr + row_offsets(slots, I, ALIGNED),
        is_slot,
        activation_scale_ptrs,
        w2_ptr + weight_offsets,
        columns < E,
        w2_scale_ptrs,
        I,
        BLOCK_K,
        HAS_BLOCKS,
    )
    if w2_bias_ptr is not None:
        bias_ptrs = w2_bias_ptr + row_offsets(expert, w2_bias_stride_x, False) + columns
        total += tl.load(bias_ptrs, mask=columns < E, other=0.0).to(tl.float32)[None, :]
    store_result(result_ptr, topk_weights_ptr, weights_stride_t, total, slots, is_slot, columns, E, K)


def _compile_cases(
    num_tokens: int, operands: str = "*bf16", blocks: bool = False, limit: float = 0.0
) -> list[CompileCase]:
    """Args: limit: swiglu_limit; a model that has one has biases too."""
    is_quantized = operands != "*bf16"
    config = select_config(num_tokens, 8, 128, 1 if is_quantized else torch.bfloat16.itemsize, blocks)
    tiles = {"K": 8, "BLOCK_T": config.block_t, "BLOCK_K": config.depth, "GROUP": config.group, "ALIGNED": True}
    tiles |= {"HAS_BLOCKS": blocks}
    result = {"topk_weights_ptr": "*fp32", "result_ptr": "*bf16"}
    cases = []
    for kernel, left, weight, pointers, constants in (
        (_gate_up_kernel, "x", "w1", {"activation_ptr": "*bf16"}, {"BLOCK_N": config.gate_n, "LIMIT": limit}),
        (_down_kernel, "activation", "w2", result, {"BLOCK_N": config.down_n}),
    ):
        types = pointers | {"sorted_slots_ptr": "*i32", "block_experts_ptr": "*i32"}
        types |= {f"{left}_ptr": operands, f"{weight}_ptr": operands}
        scales = {f"{left}_scale_ptr": "*fp32", f"{weight}_scale_ptr": "*fp32"}
        bias = {f"{weight}_bias_ptr": "*bf16"}
        given = (scales if is_quantized else {}) | (bias if limit else {})
        absent = dict.fromkeys(name for name in scales | bias if name not in given)
        numbers = [name for name in kernel.arg_names if name not in types | scales | bias | tiles | constants]
        cases.append(
            CompileCase(
                kernel,
                types | given | dict.fromkeys(numbers, "i32"),
                tiles | constants | absent,
                config.num_warps,
                config.num_stages,
                WITHOUT_FP8 if operands == "*fp8e4nv" else {},
            )
        )
    return cases


COMPILE_CASES = [
    *(case for num_tokens in (1, 512, 8192) for case in _compile_cases(num_tokens)),
    *(case for num_tokens in (1, 512) for case in _compile_cases(num_tokens, limit=7.0)),
    *(case for num_tokens in (1, 512, 8192) for case in _compile_cases(num_tokens, "*i8")),
    *(case for blocks in (False, True) for case in _compile_cases(1, "*fp8e4nv", blocks)),
    *(case for blocks in (False, True) for case in _compile_cases(512, "*fp8e4nv", blocks)),
]


@fused_moe.impl("triton", supports=supports_weights, compile_cases=COMPILE_CASES)
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
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    num_tokens, hidden_size = x.shape
    num_choices, intermediate_size = topk_ids.shape[1], w2.shape[2]
    num_experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    num_slots = num_tokens * num_choices
    if x.numel() == 0:
        return torch.empty_like(x)
    with_blocks = [has_blocks(w1, w1_scale), has_blocks(w2, w2_scale)]
    if x.is_cpu:
        config = select_cpu_config(num_tokens, num_choices, num_experts, hidden_size, any(with_blocks))
    else:
        config = select_config(num_tokens, num_choices, num_experts, w1.element_size(), any(with_blocks))
    sorted_slots, block_experts, _ = launch_moe_align_block_size(topk_ids, expert_map, num_experts, config.block_t)
    num_blocks = block_experts.shape[0]
    x_values, x_scale, x_scale_stride = _operand(x, w1, w1_scale, a1_scale)
    activation = x.new_empty(num_slots, intermediate_size)
    launch(
        _gate_up_kernel,
        (num_blocks * ceil_div(intermediate_size, config.gate_n),),
        (x_values, x_scale, w1, w1_scale, w1_bias, sorted_slots, block_experts, activation),
        (
            *(num_slots, num_blocks, x_values.stride(0), x_scale_stride),
            *(*_strides(w1, w1_scale, w1_bias), intermediate_size, hidden_size),
        ),
        (
            *(num_choices, config.block_t, config.gate_n, config.depth, config.group),
            *(rows_aligned(x_values, w1), with_blocks[0], float(swiglu_limit)),
        ),
        config.num_warps,
        config.num_stages,
    )
    values, scale, scale_stride = _operand(activation, w2, w2_scale, a2_scale)
    result = x.new_empty(num_tokens, num_choices, hidden_size)
    launch(
        _down_kernel,
        (num_blocks * ceil_div(hidden_size, config.down_n),),
        (values, scale, w2, w2_scale, w2_bias, topk_weights, sorted_slots, block_experts, result),
        (
            *(num_slots, num_blocks, scale_stride, topk_weights.stride(0)),
            *(*_strides(w2, w2_scale, w2_bias), intermediate_size, hidden_size),
        ),
        (
            *(num_choices, config.block_t, config.down_n, config.depth, config.group),
            *(rows_aligned(values, w2), with_blocks[1]),
        ),
        config.num_warps,
        config.num_stages,
    )
    return launch_moe_sum(result, topk_ids, expert_map)


def _operand(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, a_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """What meets the weight, its scales, and how far apart those of its rows are."""
    if scale is None:
        return x, None, 0
    values, scales = launch_scaled_quant(x, weight.dtype, scale_group(weight, scale, a_scale), a_scale)
    return values, scales, scales.stride(0) if scales.dim() == 2 else 0


def _strides(weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> tuple[int, ...]:
    """Of experts and rows of the weight and of its scales, and of experts of the bias."""
    scale_strides = (0, 0) if scale is None else scale.stride()[:2]
    return *weight.stride()[:2], *scale_strides, 0 if bias is None else bias.stride(0)
