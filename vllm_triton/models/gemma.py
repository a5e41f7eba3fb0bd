"""Gemma 2 and 3, as far as they differ from Llama's decoder: a norm after attention and feed-forward layer too,
embeddings that are scaled, layers with and without a window, in Gemma 3 each kind with rotary angles of its own, and in
Gemma 2 bounds on scores and logits.

Shapes: T tokens of the step, E hidden.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.config import ModelConfig
from vllm_triton.models.interface import KVCache
from vllm_triton.models.layers import RMSNorm, Slot
from vllm_triton.models.llama import DecoderLayer, LlamaForCausalLM
from vllm_triton.models.rope import cos_sin_table
from vllm_triton.quantization.schemes import Schemes, dense


class GemmaRMSNorm(RMSNorm):
    """A checkpoint holds weight - 1. The sum is kept in float32: a narrower dtype would round away what it holds."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)

    def finish_loading(self) -> None:
        self.weight.add_(1)


class GemmaDecoderLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, layer: int, schemes: Schemes):
        super().__init__(config, layer, schemes, GemmaRMSNorm)
        self.pre_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)

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
        x = self.post_attention_layernorm.alone(self.self_attn(x, positions, cos_sin, attention, kv_cache))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm.alone(self.mlp(x)), residual

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        yield from super().weight_slots()
        yield "pre_feedforward_layernorm.weight", self.pre_feedforward_layernorm.weight
        yield "post_feedforward_layernorm.weight", self.post_feedforward_layernorm.weight


class GemmaForCausalLM(LlamaForCausalLM):
    """Args: as of LlamaForCausalLM; made while torch's default dtype is that of the weights."""

    layer_class = GemmaDecoderLayer
    norm_class = GemmaRMSNorm

    def __init__(self, config: ModelConfig, max_positions: int, schemes: Schemes = dense):
        super().__init__(config, max_positions, schemes)
        # The models were trained with the factor rounded to the dtype of the table.
        self.embedding_scale = _rounded(math.sqrt(config.hidden_size), torch.get_default_dtype())
        if config.local_rope is not None:
            self.register_buffer("local_cos_sin", torch.empty(0), persistent=False)

    def finish_loading(self, device: torch.device | str) -> None:
        super().finish_loading(device)
        if self.config.local_rope is not None:
            self.local_cos_sin = cos_sin_table(self.config.local_rope, self.max_positions, device)
        for module in self.modules():
            if isinstance(module, GemmaRMSNorm):
                module.finish_loading()

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        attention: AttentionMetadata,
        kv_caches: list[KVCache],
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the step's keys and values into kv_caches."""
        x, residual = self.embed_tokens.embedding(token_ids, self.embedding_scale), None
        for layer, window, kv_cache in zip(self.layers, self.config.layer_windows, kv_caches, strict=True):
            has_local_rope = window and self.config.local_rope is not None
            cos_sin = self.local_cos_sin if has_local_rope else self.cos_sin
            x, residual = layer(x, residual, positions, cos_sin, attention, kv_cache)
        return self.norm(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, E] -> [B, V]"""
        logits, softcap = super().compute_logits(hidden), self.config.final_softcap
        return ops.softcap_logits(logits, softcap) if softcap else logits


def _rounded(value: float, dtype: torch.dtype) -> float:
    """value > 0 to nearest in a floating dtype, within its normal range."""
    unit = math.ldexp(torch.finfo(dtype).eps, math.frexp(value)[1] - 1)
    return round(value / unit) * unit
