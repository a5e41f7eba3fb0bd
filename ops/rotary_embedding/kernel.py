"""Rotary embedding, one program a token: its cosines and sines are loaded once for all heads of query and key.

    y[a] = x[a] * cos - x[b] * sin;  y[b] = x[b] * cos + x[a] * sin

float32 between load and store. With weights it is the kernel of fused_qk_norm_rope, which norms a head before it turns.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_triton.ops.launch import CompileCase, launch, next_power_of_2, rows_aligned, store_modifier, supports_triton
from vllm_triton.ops.rotary_embedding.op import rotary_embedding

# Elements of a tile of heads: more heads than fit are turned in a loop.
LARGEST_TILE = 4096


@triton.jit
def _turn_heads(
    heads_ptr,  # [NUM_HEADS, D] of one token
    weight_ptr,  # [D], or None where heads are not normed
    out_ptr,  # [NUM_HEADS, D] of one token, contiguous
    heads_stride_h,
    cos,  # [1, BLOCK_PAIRS]
    sin,  # [1, BLOCK_PAIRS]
    eps,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    STORE: tl.constexpr,
):
    pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
    first = pairs * 2 if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else first + R // 2
    rest = R + tl.arange(0, BLOCK_REST)[None, :]
    if weight_ptr is not None:
        weight_a = tl.load(weight_ptr + first, mask=pairs < R // 2, other=0.0).to(tl.float32)
        weight_b = tl.load(weight_ptr + second, mask=pairs < R // 2, other=0.0).to(tl.float32)
    for start in range(0, NUM_HEADS, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)
        head_offsets = heads.to(tl.int64) * heads_stride_h
        if ROWS_ALIGNED:
            head_offsets = tl.multiple_of(head_offsets, 16)
        head_mask = (heads < NUM_HEADS)[:, None]
        mask = head_mask & (pairs < R // 2)
        rest_mask = head_mask & (rest < D)
        x_ptr = heads_ptr + head_offsets[:, None]
        y_ptr = out_ptr + heads[:, None] * D
        a = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + second, mask=mask, other=0.0).to(tl.float32)
        if R < D:
            c = tl.load(x_ptr + rest, mask=rest_mask, other=0.0)
        if weight_ptr is not None:
            squares = tl.sum(a * a + b * b, axis=1)
            if R < D:
                c = c.to(tl.float32)
                squares += tl.sum(c * c, axis=1)
            scale = tl.rsqrt(squares / D + eps)[:, None]
            a = a * scale * weight_a
            b = b * scale * weight_b
            if R < D:
                c = c * scale * tl.load(weight_ptr + rest, mask=rest < D, other=0.0).to(tl.float32)
        tl.store(y_ptr + first, a * cos - b * sin, mask=mask, cache_modifier=STORE)
        tl.store(y_ptr + second, b * cos + a * sin, mask=mask, cache_modifier=STORE)
        if R < D:
            tl.store(y_ptr + rest, c, mask=rest_mask, cache_modifier=STORE)


@triton.jit(do_not_specialize=["query_stride_t", "query_stride_h", "key_stride_t", "key_stride_h", "cos_sin_stride_m"])
def _rotary_embedding_kernel(
    positions_ptr,  # [T]
    query_ptr,  # [T, H, D]
    key_ptr,  # [T, G, D]
    query_weight_ptr,  # [D], or None
    key_weight_ptr,  # [D], or None
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
    INTERLEAVED: tl.constexpr,
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
    _turn_heads(
        query_ptr + query_offset, query_weight_ptr, query_out_ptr + token * (H * D), query_stride_h, cos, sin, eps,
        H, D, R, INTERLEAVED, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST, ROWS_ALIGNED, STORE,
    )  # fmt: skip
    BLOCK_KV_HEADS: tl.constexpr = min(BLOCK_HEADS, triton.next_power_of_2(G))
    _turn_heads(
        key_ptr + key_offset, key_weight_ptr, key_out_ptr + token * (G * D), key_stride_h, cos, sin, eps,
        G, D, R, INTERLEAVED, BLOCK_KV_HEADS, BLOCK_PAIRS, BLOCK_REST, ROWS_ALIGNED, STORE,
    )  # fmt: skip


@dataclass(frozen=True)
class RotaryEmbeddingConfig:
    block_heads: int
    block_pairs: int
    block_rest: int
    num_warps: int


@functools.cache
def select_config(num_heads: int, head_size: int, rotary: int) -> RotaryEmbeddingConfig:
    block_pairs = next_power_of_2(rotary // 2)
    block_heads = min(next_power_of_2(num_heads), max(LARGEST_TILE // block_pairs, 1))
    num_warps = min(max(block_heads * block_pairs // 256, 1), 8)
    return RotaryEmbeddingConfig(block_heads, block_pairs, next_power_of_2(max(head_size - rotary, 1)), num_warps)


def compile_case(num_heads: int, num_kv_heads: int, rotary: int, interleaved: bool, has_norm: bool) -> CompileCase:
    """Of bfloat16 heads of 128 elements."""
    config = select_config(num_heads, 128, rotary)
    tensors = ["query_ptr", "key_ptr", "query_out_ptr", "key_out_ptr"]
    weights = ["query_weight_ptr", "key_weight_ptr"]
    strides = ["query_stride_t", "query_stride_h", "key_stride_t", "key_stride_h", "cos_sin_stride_m"]
    return CompileCase(
        _rotary_embedding_kernel,
        dict.fromkeys(tensors + weights * has_norm, "*bf16")
        | {"positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "eps": "fp32"}
        | dict.fromkeys(strides, "i32"),
        {
            "H": num_heads,
            "G": num_kv_heads,
            "D": 128,
            "R": rotary,
            "INTERLEAVED": interleaved,
            "BLOCK_HEADS": config.block_heads,
            "BLOCK_PAIRS": config.block_pairs,
            "BLOCK_REST": config.block_rest,
            "ROWS_ALIGNED": True,
            "STORE": "",
        }
        | ({} if has_norm else dict.fromkeys(weights)),
        config.num_warps,
    )


COMPILE_CASES = [
    compile_case(32, 8, rotary, interleaved, has_norm=False) for rotary, interleaved in ((128, False), (96, True))
]


def launch_turned(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turned query and key; normed before where there are weights."""
    num_tokens, num_query_heads, head_size = query.shape
    num_kv_heads, rotary = key.shape[1], cos_sin.shape[1]
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    if num_tokens == 0:
        return query_out, key_out
    config = select_config(max(num_query_heads, num_kv_heads), head_size, rotary)
    sizes = (num_query_heads, num_kv_heads, head_size, rotary, interleaved)
    tiles = (config.block_heads, config.block_pairs, config.block_rest)
    launch(
        _rotary_embedding_kernel,
        (num_tokens,),
        (positions, query, key, query_weight, key_weight, cos_sin, query_out, key_out),
        (*query.stride()[:2], *key.stride()[:2], cos_sin.stride(0), eps),
        (*sizes, *tiles, rows_aligned(query, key, cos_sin), store_modifier(query_out, key_out)),
        config.num_warps,
    )
    return query_out, key_out


@rotary_embedding.impl("triton", supports=supports_triton, compile_cases=COMPILE_CASES)
def launch_rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_turned(positions, query, key, None, None, cos_sin, 0.0, interleaved)
