"""The Llama family: Llama 2 and 3, SmolLM2, Mistral (window), Qwen2 (bias), Qwen3 (norm of queries and keys), Phi-3 and
Phi-4 (packed projections, rotation of a part of a head), and with experts (models/moe.py) Mixtral and Qwen3-MoE.

One decoder, told apart by ModelConfig. Shapes: T tokens of the step, E hidden, H query heads, G KV heads, D head size.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.errors import ModelError
from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.config import ModelConfig
from vllm_triton.models.interface import KVCache
from vllm_triton.models.layers import (
    Linear,
    RMSNorm,
    Slot,
    Table,
    Weight,
    held_alike,
    linear_slots,
    table_slots,
    weight_of,
)
from vllm_triton.models.moe import SparseMoe
from vllm_triton.models.packed_weight import PackedSlot, Stored
from vllm_triton.models.rope import cos_sin_table
from vllm_triton.models.scaled_weight import can_end
from vllm_triton.ops.contract import FLOATS
from vllm_triton.ops.scaled_mm.reference import SCALE_BLOCK
from vllm_triton.quantization.schemes import LayerKind, Schemes, dense


class Attention(nn.Module):
    """Args: norm: of query and key heads, where the configuration has them."""

    def __init__(self, config: ModelConfig, layer: int, schemes: Schemes, norm: type[RMSNorm] = RMSNorm):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.query_size = config.num_heads * config.head_size
        self.kv_size = config.num_kv_heads * config.head_size
        self.window = config.layer_windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        sizes, fused = (self.query_size, self.kv_size, self.kv_size), config.fused_projections
        self.qkv_names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
        held = {
            name: schemes(f"model.layers.{layer}.self_attn.{name}", LayerKind.LINEAR)
            for name in (*self.qkv_names, "o_proj")
        }
        qkv = [held[name] for name in self.qkv_names]
        self.qkv_proj = Linear(config.hidden_size, sizes, config.qkv_bias, qkv, fused)
        self.o_proj = Linear(self.query_size, (config.hidden_size,), config.output_bias, (held["o_proj"],))
        self.q_norm = norm(config.head_size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = norm(config.head_size, config.rms_norm_eps) if config.qk_norm else None
        # In float32, as attention reads them.
        sinks = nn.Parameter(torch.empty(config.num_heads, dtype=torch.float32), requires_grad=False)
        self.sinks = sinks if config.attention_sinks else None
        # Of a quantized cache. Keys and values are far smaller than the largest fp8 of 448, and 1 rounds none of them;
        # a checkpoint may know better.
        self.stored_kv_scales = config.stored_kv_scales
        for name in ("k_scale", "v_scale"):
            scale = torch.ones(1, dtype=torch.float32) if config.quantized_kv_cache else None
            self.register_buffer(name, scale, persistent=False)

    def forward(
        self,
        x: torch.Tensor,  # [T, E]
        positions: torch.Tensor,  # [T]
        cos_sin: torch.Tensor,  # [M, R]
        attention: AttentionMetadata,
        kv_cache: KVCache,
    ) -> torch.Tensor:
        num_tokens = x.shape[0]
        query, key, value = self.qkv_proj.split(x)
        query = query.view(num_tokens, self.num_heads, self.head_size)
        key = key.view(num_tokens, self.num_kv_heads, self.head_size)
        value = value.view(num_tokens, self.num_kv_heads, self.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            weights, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
            query, key = ops.fused_qk_norm_rope(positions, query, key, *weights, cos_sin, eps)
        else:
            query, key = ops.rotary_embedding(positions, query, key, cos_sin, False)
        key_cache, value_cache = kv_cache
        out = torch.empty_like(query)
        scales = (self.k_scale, self.v_scale)
        ops.reshape_and_cache(key, value, key_cache, value_cache, attention.slot_mapping, *scales)
        ops.paged_attention(
            out,
            query,
            key_cache,
            value_cache,
            attention.block_table,
            attention.seq_lens,
            attention.query_start_loc,
            self.scale,
            self.window,
            self.softcap,
            True,
            self.sinks,
            *scales,
        )
        return self.o_proj(out.view(num_tokens, self.query_size))

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        qkv = tuple(f"self_attn.{name}" for name in self.qkv_names)
        yield from linear_slots({qkv: self.qkv_proj, ("self_attn.o_proj",): self.o_proj})
        if self.q_norm is not None and self.k_norm is not None:
            yield "self_attn.q_norm.weight", self.q_norm.weight
            yield "self_attn.k_norm.weight", self.k_norm.weight
        if self.sinks is not None:
            yield "self_attn.sinks", self.sinks
        for name in ("k_scale", "v_scale") if self.stored_kv_scales else ():
            scale = getattr(self, name)
            take = (lambda stored: None) if scale is None else scale.copy_
            yield f"self_attn.{name}", PackedSlot(Stored(((1,), ()), FLOATS), take)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, schemes: Schemes):
        super().__init__()
        fused = config.fused_projections
        self.gate_up_names = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
        names = [f"model.layers.{layer}.mlp.{name}" for name in (*self.gate_up_names, "down_proj")]
        *gate_up, down = (schemes(name, LayerKind.LINEAR) for name in names)
        alike, size = held_alike(gate_up, names[:-1]), config.intermediate_size
        if not fused and not can_end(alike[0], size):
            raise ModelError(f"{names[0]} must have a multiple of {SCALE_BLOCK} rows for scales of blocks, got {size}")
        self.gate_up_proj = Linear(config.hidden_size, (size,) * 2, config.mlp_bias, alike, fused)
        self.down_proj = Linear(size, (config.hidden_size,), config.mlp_bias, (down,))
        self.activation = config.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        if self.activation == "silu":
            return self.down_proj(ops.silu_and_mul(gate_up))
        return self.down_proj(ops.gelu_and_mul(gate_up, self.activation == "gelu_pytorch_tanh"))

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        gate_up = tuple(f"mlp.{name}" for name in self.gate_up_names)
        yield from linear_slots({gate_up: self.gate_up_proj, ("mlp.down_proj",): self.down_proj})


class DecoderLayer(nn.Module):
    moe_class: type[SparseMoe] = SparseMoe

    def __init__(self, config: ModelConfig, layer: int, schemes: Schemes, norm: type[RMSNorm] = RMSNorm):
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, schemes, norm)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        moe = config.moe
        is_sparse = moe is not None and moe.sparse_layers[layer]
        if moe is not None and is_sparse:
            self.mlp: SparseMoe | MLP = self.moe_class(config, moe, layer, schemes)
        else:
            self.mlp = MLP(config, layer, schemes)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        attention: AttentionMetadata,
        kv_cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, cos_sin, attention, kv_cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        yield from self.self_attn.weight_slots()
        yield from self.mlp.weight_slots()
        yield "input_layernorm.weight", self.input_layernorm.weight
        yield "post_attention_layernorm.weight", self.post_attention_layernorm.weight


class LlamaForCausalLM(nn.Module):
    """Args:
    max_positions: rows of the table of rotary angles, the longest sequence in tokens.
    schemes: how each layer's weight is held.
    """

    layer_class: type[DecoderLayer] = DecoderLayer
    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, max_positions: int, schemes: Schemes = dense):
        super().__init__()
        self.config = config

        def table(name: str, kind: LayerKind) -> Weight:
            return weight_of((config.vocab_size,), config.hidden_size, schemes(name, kind))

        self.embed_tokens = cast(Table, table("model.embed_tokens", LayerKind.EMBEDDING))
        self.layers = nn.ModuleList(self.layer_class(config, layer, schemes) for layer in range(config.num_layers))
        self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        # A tied head has no parameter of its own: moving the module would make two of one.
        self.untied_head = None if config.tie_word_embeddings else table("lm_head", LayerKind.HEAD)
        self.max_positions = max_positions
        self.register_buffer("cos_sin", torch.empty(0), persistent=False)

    def finish_loading(self, device: torch.device | str) -> None:
        """Makes what is computed rather than loaded."""
        self.cos_sin = cos_sin_table(self.config.rope, self.max_positions, device)

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        attention: AttentionMetadata,
        kv_caches: list[KVCache],
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the step's keys and values into kv_caches."""
        x, residual = self.embed_tokens.embedding(token_ids), None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, positions, self.cos_sin, attention, kv_cache)
        return self.norm(x, residual)[0]

    @property
    def lm_head(self) -> Weight:
        """[V, E]"""
        return self.embed_tokens if self.untied_head is None else self.untied_head

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, E] -> [B, V]"""
        return self.lm_head.linear(hidden, None)

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        """Every tensor of a checkpoint, by its Hugging Face name, and the part of a parameter that it fills."""
        yield from table_slots("model.embed_tokens", self.embed_tokens)
        for index, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            for name, slot in layer.weight_slots():
                yield f"model.layers.{index}.{name}", slot
        yield "model.norm.weight", self.norm.weight
        if self.untied_head is not None:
            yield from table_slots("lm_head", self.untied_head)

    def surplus_names(self) -> tuple[str, ...]:
        """Endings of names that checkpoints of the family may hold without need."""
        return (
            ("rotary_emb.inv_freq", "lm_head.weight") if self.config.tie_word_embeddings else ("rotary_emb.inv_freq",)
        )
