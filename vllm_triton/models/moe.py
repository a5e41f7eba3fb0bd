"""The feed-forward layer of Mixtral and Qwen3-MoE: a router, and experts of which each token takes a few."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from vllm_triton import ops
from vllm_triton.errors import ModelError
from vllm_triton.models.config import ModelConfig, MoeConfig
from vllm_triton.models.int4_weight import Int4ExpertWeight
from vllm_triton.models.layers import Linear, Slot, held_alike, linear_slots, parameter
from vllm_triton.models.scaled_weight import ExpertWeight
from vllm_triton.quantization.schemes import GgufScheme, Int4Scheme, LayerKind, ScaledScheme, Schemes

# Architecture -> what checkpoints call the layer, its router, and the gate, up and down projection of an expert.
_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe", "gate", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    "GptOssForCausalLM": ("mlp", "router", "gate_up_proj", "gate_up_proj", "down_proj"),
}


class SparseMoe(nn.Module):
    """x [T, E] -> [T, E]."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, layer: int, schemes: Schemes):
        super().__init__()
        self.swiglu_limit = moe.swiglu_limit
        self.num_choices, self.renormalize = moe.num_experts_per_token, moe.renormalize
        self.layer_name, self.router_name, *self.projection_names = _NAMES[config.architecture]
        name, count = f"model.layers.{layer}.{self.layer_name}", moe.num_experts
        router = schemes(f"{name}.{self.router_name}", LayerKind.ROUTER)
        self.gate = Linear(config.hidden_size, (count,), moe.bias, (router,))
        experts = [f"{name}.experts.{expert}.{part}" for expert in range(count) for part in self.projection_names]
        scheme, *_ = held_alike([schemes(expert, LayerKind.EXPERTS) for expert in experts], experts)
        if isinstance(scheme, Int4Scheme) and (moe.bias or moe.swiglu_limit):
            raise ModelError(f"{name}.experts, with biases or a clamp, must not be held in 4 bits, got {scheme}")
        if isinstance(scheme, GgufScheme):
            raise ModelError(f"{name}.experts must be held in full precision, int4, int8 or fp8, got {scheme}")
        self.w1 = _expert_weight(count, (moe.intermediate_size,) * 2, config.hidden_size, scheme)
        self.w2 = _expert_weight(count, (config.hidden_size,), moe.intermediate_size, scheme)
        self.w1_bias = parameter(count, 2 * moe.intermediate_size) if moe.bias else None
        self.w2_bias = parameter(count, config.hidden_size) if moe.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = ops.topk_routing(self.gate(x), None, self.num_choices, False, self.renormalize, 1, 1, 1.0)
        if isinstance(self.w1, Int4ExpertWeight) and isinstance(self.w2, Int4ExpertWeight):
            return ops.fused_moe_w4a16(x, *self.w1.operands(), *self.w2.operands(), weights, ids, None)
        return ops.fused_moe(
            x,
            self.w1.weight,
            self.w2.weight,
            weights,
            ids,
            None,
            self.w1_bias,
            self.w2_bias,
            self.swiglu_limit,
            self.w1.weight_scale,
            self.w2.weight_scale,
            self.w1.input_scale,
            self.w2.input_scale,
        )

    def weight_slots(self) -> Iterator[tuple[str, Slot]]:
        yield from linear_slots({(f"{self.layer_name}.{self.router_name}",): self.gate})
        yield from self.expert_slots()

    def expert_slots(self) -> Iterator[tuple[str, Slot]]:
        for expert, parts in enumerate(zip(self.w1.slots(), self.w2.slots(), strict=True)):
            for name, slots in zip(self.projection_names, (slots for part in parts for slots in part), strict=True):
                for ending, slot in slots.items():
                    yield f"{self.layer_name}.experts.{expert}.{name}.{ending}", slot


def _expert_weight(
    num_experts: int, sizes: Sequence[int], in_size: int, scheme: ScaledScheme | Int4Scheme | None
) -> ExpertWeight | Int4ExpertWeight:
    if isinstance(scheme, Int4Scheme):
        return Int4ExpertWeight(num_experts, sizes, in_size, scheme)
    return ExpertWeight(num_experts, sizes, in_size, scheme)
