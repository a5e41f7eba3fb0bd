"""The feed-forward layer of Mixtral and Qwen3-MoE: a router, and experts of which each token takes a few."""

from collections.abc import Iterator

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.models.config import ModelConfig, MoeConfig
from vllm_triton.models.layers import Linear, Slot, linear_slots, parameter
from vllm_triton.quantization.schemes import LayerKind, Schemes

# Architecture -> what checkpoints call the layer, and the gate, up and down projection of an expert.
_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


class SparseMoe(nn.Module):
    """x [T, E] -> [T, E]."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, layer: int, schemes: Schemes):
        super().__init__()
        self.names = _NAMES[config.architecture]
        self.num_choices, self.renormalize = moe.num_experts_per_token, moe.renormalize
        name = f"model.layers.{layer}.{self.names[0]}"
        router = schemes(f"{name}.gate", LayerKind.ROUTER)
        self.gate = Linear(config.hidden_size, (moe.num_experts,), False, (router,))
        self.w1 = parameter(moe.num_experts, 2 * moe.intermediate_size, config.hidden_size)
        self.w2 = parameter(moe.num_experts, config.hidden_size, moe.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = ops.topk_routing(self.gate(x), None, self.num_choices, False, self.renormalize, 1, 1, 1.0)
        return ops.fused_moe(x, self.w1, self.w2, weights, ids, None)

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        layer, gate, up, down = self.names
        yield from linear_slots({(f"{layer}.gate",): self.gate})
        middle = self.w2.shape[2]
        for expert, (w1, w2) in enumerate(zip(self.w1, self.w2, strict=True)):
            yield f"{layer}.experts.{expert}.{gate}.weight", w1[:middle]
            yield f"{layer}.experts.{expert}.{up}.weight", w1[middle:]
            yield f"{layer}.experts.{expert}.{down}.weight", w2
