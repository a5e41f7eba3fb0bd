"""gpt-oss, as far as it differs from Llama's decoder: sinks and alternating windows, which are in llama.py, and layers
of experts with biases and an activation of their own, which a checkpoint holds stacked.

Shapes: X experts, E hidden, I intermediate size of an expert.
"""

from collections.abc import Iterator

import torch

from vllm_triton.errors import ModelError
from vllm_triton.models.config import ModelConfig, MoeConfig
from vllm_triton.models.layers import Slot
from vllm_triton.models.llama import DecoderLayer, LlamaForCausalLM
from vllm_triton.models.moe import SparseMoe
from vllm_triton.models.packed_weight import PackedSlot, Stored
from vllm_triton.models.scaled_weight import ExpertWeight
from vllm_triton.ops.contract import FLOATS
from vllm_triton.quantization.schemes import ScaledScheme, Schemes


class GptOssMoe(SparseMoe):
    """A checkpoint holds inputs before outputs, and the rows of gate and up by turns, in full precision."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, layer: int, schemes: Schemes):
        super().__init__(config, moe, layer, schemes)
        scheme = self.w1.scheme
        if isinstance(scheme, ScaledScheme) and scheme.scale_name is not None:
            raise ModelError(
                f"model.layers.{layer}.mlp.experts must be stored in full precision for gpt-oss, and can be quantized "
                f"at load, got {scheme}"
            )

    def expert_slots(self) -> Iterator[tuple[str, Slot]]:
        assert self.w1_bias is not None and self.w2_bias is not None, "gpt-oss has biases"
        assert isinstance(self.w1, ExpertWeight) and isinstance(self.w2, ExpertWeight), "biases are not met by 4 bits"
        gate_bias, up_bias = self.w1_bias.chunk(2, dim=-1)

        def take_gate_up(tensor: torch.Tensor) -> None:  # [X, E, 2 * I]
            for expert, (gate, up) in zip(tensor, self.w1.slots(), strict=True):
                gate["weight"].copy_(expert[:, ::2].T)
                up["weight"].copy_(expert[:, 1::2].T)

        def take_gate_up_bias(tensor: torch.Tensor) -> None:  # [X, 2 * I]
            gate_bias.copy_(tensor[:, ::2])
            up_bias.copy_(tensor[:, 1::2])

        def take_down(tensor: torch.Tensor) -> None:  # [X, I, E]
            for expert, [down] in zip(tensor, self.w2.slots(), strict=True):
                down["weight"].copy_(expert.T)

        for name, weight, take in (("gate_up_proj", self.w1, take_gate_up), ("down_proj", self.w2, take_down)):
            shape = weight.weight.transpose(1, 2).shape
            yield f"mlp.experts.{name}", PackedSlot(Stored((shape,), FLOATS), take)
        bias_shape = self.w1_bias.shape
        yield "mlp.experts.gate_up_proj_bias", PackedSlot(Stored((bias_shape,), FLOATS), take_gate_up_bias)
        yield "mlp.experts.down_proj_bias", self.w2_bias


class GptOssDecoderLayer(DecoderLayer):
    moe_class = GptOssMoe


class GptOssForCausalLM(LlamaForCausalLM):
    """Args: as of LlamaForCausalLM."""

    layer_class = GptOssDecoderLayer
