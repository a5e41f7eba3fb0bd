"""Rejection sampling, one program a row, which stops at the first draft that is not kept; float32 throughout.

A greedy row reads the vocabulary once a draft. Any other reads two numbers of a draft that is kept; the replacement of
one that is not is drawn in two levels, block by block and then within the block, as sample_tokens does.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, supports_triton
from vllm_triton.ops.rejection_sample import reference
from vllm_triton.ops.rejection_sample.op import rejection_sample
from vllm_triton.ops.sample_tokens.kernel import first_passed, select_config

ACCEPT_FROM = tl.constexpr(reference.ACCEPT_FROM)
REPLACE_FROM = tl.constexpr(reference.REPLACE_FROM)


@triton.jit
def _largest(target_ptr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The first of the largest probabilities."""
    best = tl.load(target_ptr)
    token = tl.program_id(0) * 0
    for start in range(0, V, BLOCK_V):
        tokens = start + tl.arange(0, BLOCK_V)
        probabilities = tl.load(target_ptr + tokens, mask=tokens < V, other=-1.0)
        block_best, index = tl.max(probabilities, axis=0, return_indices=True)
        token = tl.where(block_best > best, start + index, token)
        best = tl.maximum(best, block_best)
    return token


@triton.jit
def _left(target_ptr, draft_ptr, draft_offset, own, start, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """A block of max(target - draft, 0); a draft that was certain has all its probability at `own`."""
    tokens = start + tl.arange(0, BLOCK_V)
    target = tl.load(target_ptr + tokens, mask=tokens < V, other=0.0)
    if draft_ptr is None:
        left = tl.where(tokens == own, 0.0, target)
    else:
        left = tl.maximum(target - tl.load(draft_ptr + draft_offset + tokens, mask=tokens < V, other=0.0), 0.0)
    return left


@triton.jit
def _replacement(target_ptr, draft_ptr, draft_offset, own, uniform, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The first token at which the running mass passes uniform * total."""
    wanted = uniform * 0.0 + float("inf")
    mass = uniform * 0.0
    mass_before = mass
    block = tl.program_id(0) * 0
    for _ in range(2):  # the first pass sums the row, the second finds the block
        wanted = tl.where(mass > 0, uniform * mass, wanted)
        mass = uniform * 0.0
        for start in range(0, V, BLOCK_V):
            if mass <= wanted:
                here = tl.sum(_left(target_ptr, draft_ptr, draft_offset, own, start, V, BLOCK_V))
                is_taken = mass + here > mass
                block = tl.where(is_taken, start, block)
                mass_before = tl.where(is_taken, mass, mass_before)
                mass += here
    left = _left(target_ptr, draft_ptr, draft_offset, own, block, V, BLOCK_V)
    # Where nothing is left, which rounding alone can bring about, any token does.
    return tl.maximum(first_passed(left, mass_before, wanted, block, V, BLOCK_V), 0)


@triton.jit(
    do_not_specialize=["out_stride_b", "target_stride_n", "draft_stride_n"],
    do_not_specialize_on_alignment=[
        *("out_ptr", "draft_tokens_ptr", "draft_start_loc_ptr", "target_ptr", "draft_ptr"),
        *("bonus_tokens_ptr", "is_greedy_ptr", "seeds_ptr", "steps_ptr"),
    ],
)
def _rejection_sample_kernel(
    out_ptr,  # [B, S + 1]
    draft_tokens_ptr,  # [N]
    draft_start_loc_ptr,  # [B + 1]
    target_ptr,  # [N, V]
    draft_ptr,  # [N, V] or None
    bonus_tokens_ptr,  # [B]
    is_greedy_ptr,  # [B]
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    out_stride_b,
    target_stride_n,
    draft_stride_n,
    WIDTH: tl.constexpr,
    V: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Keeps draft i where uniform * draft[i, d] < target[i, d], or where d is the largest; see the op.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(draft_start_loc_ptr + row)
    count = tl.load(draft_start_loc_ptr + row + 1) - first
    is_greedy = tl.load(is_greedy_ptr + row)
    seed = tl.load(seeds_ptr + row)
    step = tl.load(steps_ptr + row)
    places = tl.arange(0, BLOCK_WIDTH)
    tokens = tl.full([BLOCK_WIDTH], -1, tl.int64)
    index = first * 0
    goes_on = index < count
    while goes_on:
        draft = (first + index).to(tl.int64)
        own = tl.load(draft_tokens_ptr + draft).to(tl.int32)
        row_target_ptr = target_ptr + draft * target_stride_n
        token = own
        is_kept = own >= 0
        if is_greedy:
            token = _largest(row_target_ptr, V, BLOCK_V)
            is_kept = token == own
        else:
            draft_offset = draft * draft_stride_n
            of_draft = 1.0 if draft_ptr is None else tl.load(draft_ptr + draft_offset + own)
            is_kept = tl.rand(seed, (step + ACCEPT_FROM) + index) * of_draft < tl.load(row_target_ptr + own)
            if is_kept == 0:
                uniform = tl.rand(seed, (step + REPLACE_FROM) + index)
                token = _replacement(row_target_ptr, draft_ptr, draft_offset, own, uniform, V, BLOCK_V)
        tokens = tl.where(places == index, token.to(tl.int64), tokens)
        index += 1
        goes_on = is_kept & (index < count)
        if is_kept & (index == count):
            tokens = tl.where(places == index, tl.load(bonus_tokens_ptr + row), tokens)
    if count == 0:
        tokens = tl.where(places == 0, tl.load(bonus_tokens_ptr + row), tokens)
    tl.store(out_ptr + row * out_stride_b + places, tokens, mask=places < WIDTH)


COMPILE_CASES = [
    CompileCase(
        _rejection_sample_kernel,
        {"draft_start_loc_ptr": "*i32", "target_ptr": "*fp32", "is_greedy_ptr": "*i1"}
        | {f"{name}_ptr": "*i64" for name in ("out", "draft_tokens", "bonus_tokens", "seeds", "steps")}
        | {f"{name}_stride_{axis}": "i32" for name, axis in (("out", "b"), ("target", "n"), ("draft", "n"))}
        | ({"draft_ptr": "*fp32"} if has_draft else {}),
        {"WIDTH": 5, "V": 49152, "BLOCK_WIDTH": 8, "BLOCK_V": select_config(49152, "cuda").block_v}
        | ({} if has_draft else {"draft_ptr": None}),
        num_warps=select_config(49152, "cuda").num_warps,
    )
    for has_draft in (True, False)
]


@rejection_sample.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_rejection_sample(
    out: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_start_loc: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    bonus_tokens: torch.Tensor,
    is_greedy: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> None:
    num_rows, width = out.shape
    if num_rows == 0:
        return
    vocabulary = target_probs.shape[1]
    config = select_config(vocabulary, out.device.type)
    strides = (out.stride(0), target_probs.stride(0), 0 if draft_probs is None else draft_probs.stride(0))
    rows = (bonus_tokens, is_greedy, seeds, steps)
    launch(
        _rejection_sample_kernel,
        (num_rows,),
        (out, draft_tokens, draft_start_loc, target_probs, draft_probs, *rows),
        strides,
        (width, vocabulary, triton.next_power_of_2(width), config.block_v),
        config.num_warps,
    )
