"""Norm and rotation of query and key heads, one program a token: a head is loaded once, as the two halves that turn.

    n = x * rsqrt(mean x^2 + eps) * weight;  y[a] = n[a] * cos - n[b] * sin;  y[b] = n[b] * cos + n[a] * sin

float32 between load and store.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4; Su et al., "RoFormer: Enhanced
Transformer with Rotary Position Embedding", equation 34.
"""

import torch
import triton
import triton.language as tl

from vllm_triton.ops.fused_qk_norm_rope.op import fused_qk_norm_rope
from vllm_triton.ops.launch import CompileCase, launch, rows_aligned, store_modifier, supports_triton
from vllm_triton.ops.rotary_embedding.kernel import select_config


@triton.jit
def _norm_and_turn_heads(
    heads_ptr,  # [NUM_HEADS, D] of one token
    weight_ptr,  # [D]
    out_ptr,  # [NUM_HEADS, D] of one token, contiguous
    heads_stride_h,
    cos,  # [1, BLOCK_PAIRS]
    sin,  # [1, BLOCK_PAIRS]
    eps,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    STORE: tl.constexpr,
):
    first = tl.arange(0, BLOCK_PAIRS)[None, :]
    second = first + R // 2
    rest = R + tl.arange(0, BLOCK_REST)[None, :]
    weight_a = tl.load(weight_ptr + first, mask=first < R // 2, other=0.0).to(tl.float32)
    weight_b = tl.load(weight_ptr + second, mask=first < R // 2, other=0.0).to(tl.float32)
    for start in range(0, NUM_HEADS, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)
        head_offsets = heads.to(tl.int64) * heads_stride_h
        if ROWS_ALIGNED:
            head_offsets = tl.multiple_of(head_offsets, 16)
        head_mask = (heads < NUM_HEADS)[:, None]
        mask = head_mask & (first < R // 2)
        rest_mask = head_mask & (rest < D)
        x_ptr = heads_ptr + head_offsets[:, None]
        y_ptr = out_ptr + heads[:, None] * D
        a = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + second, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(a * a + b * b, axis=1)
        if R < D:
            x = tl.load(x_ptr + rest, mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(x * x, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a = a * scale * weight_a
        b = b * scale * weight_b
        tl.store(y_ptr + first, a * cos - b * sin, mask=mask, cache_modifier=STORE)
        tl.store(y_ptr + second, b * cos + a * sin, mask=mask, cache_modifier=STORE)
        if R < D:
            weight = tl.load(weight_ptr + rest, mask=rest < D, other=0.0).to(tl.float32)
            tl.store(y_ptr + rest, x * scale * weight, mask=rest_mask, cache_modifier=STORE)


@triton.jit(do_not_specialize=["query_stride_t", "query_stride_h", "key_stride_t", "key_stride_h", "cos_sin_stride_m"])
def _fused_qk_norm_rope_kernel(
    positions_ptr,  # [T]
    query_ptr,  # [T, H, D]
    key_ptr,  # [T, G, D]
    query_weight_ptr,  # [D]
    key_weight_ptr,  # [D]
    cos_sin_ptr,  # [M, R]
    query_out_ptr,  # [T, H, D], contiguous
    key_out_ptr,  # [T, G, D], contiguous
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    cos_sin_stride_m,
    eps: tl.float32,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    STORE: tl.constexpr,  # cache modifier
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    query_offset = token * query_stride_t
    key_offset = token * key_stride_t
    cos_sin_offset = position * cos_sin_stride_m
    if ROWS_ALIGNED:
        query_offset = tl.multiple_of(query_offset, 16)
        key_offset = tl.multiple_of(key_offset, 16)
        cos_sin_offset = tl.multiple_of(cos_sin_offset, 16)
    pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
    cos_ptr = cos_sin_ptr + cos_sin_offset + pairs
    cos = tl.load(cos_ptr, mask=pairs < R // 2, other=0.0)
    sin = tl.load(cos_ptr + R // 2, mask=pairs < R // 2, other=0.0)
    _norm_and_turn_heads(
        query_ptr + query_offset, query_weight_ptr, query_out_ptr + token * (H * D), query_stride_h, cos, sin, eps,
        H, D, R, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST, ROWS_ALIGNED, STORE,
    )  # fmt: skip
    BLOCK_KV_HEADS: tl.constexpr = min(BLOCK_HEADS, triton.next_power_of_2(G))
    _norm_and_turn_heads(
        key_ptr + key_offset, key_weight_ptr, key_out_ptr + token * (G * D), key_stride_h, cos, sin, eps,
        G, D, R, BLOCK_KV_HEADS, BLOCK_PAIRS, BLOCK_REST, ROWS_ALIGNED, STORE,
    )  # fmt: skip


_POINTERS = {
    "positions_ptr": "*i64",
    "query_ptr": "*bf16",
    "key_ptr": "*bf16",
    "query_weight_ptr": "*bf16",
    "key_weight_ptr": "*bf16",
    "cos_sin_ptr": "*fp32",
    "query_out_ptr": "*bf16",
    "key_out_ptr": "*bf16",
}
_STRIDES = ("query_stride_t", "query_stride_h", "key_stride_t", "key_stride_h", "cos_sin_stride_m")
COMPILE_CASES = [
    CompileCase(
        _fused_qk_norm_rope_kernel,
        _POINTERS | dict.fromkeys(_STRIDES, "i32") | {"eps": "fp32"},
        {
            "H": 16,
            "G": 8,
            "D": 128,
            "R": rotary,
            "BLOCK_HEADS": 16,
            "BLOCK_PAIRS": 64,
            "BLOCK_REST": 64,
            "ROWS_ALIGNED": True,
            "STORE": "",
        },
        num_warps=4,
    )
    for rotary in (128, 96)
]


@fused_qk_norm_rope.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_fused_qk_norm_rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_query_heads, head_size = query.shape
    num_kv_heads, rotary = key.shape[1], cos_sin.shape[1]
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    if num_tokens == 0:
        return query_out, key_out
    config = select_config(max(num_query_heads, num_kv_heads), head_size, rotary)
    sizes = (num_query_heads, num_kv_heads, head_size, rotary)
    tiles = (config.block_heads, config.block_pairs, config.block_rest)
    launch(
        _fused_qk_norm_rope_kernel,
        (num_tokens,),
        (positions, query, key, query_weight, key_weight, cos_sin, query_out, key_out),
        (*query.stride()[:2], *key.stride()[:2], cos_sin.stride(0), eps),
        (*sizes, *tiles, rows_aligned(query, key, cos_sin), store_modifier(query_out, key_out)),
        config.num_warps,
    )
    return query_out, key_out
