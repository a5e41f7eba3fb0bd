"""Which decoder runs a checkpoint: from config.json's `architectures` to a class."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from vllm_triton.models.config import ModelConfig
from vllm_triton.models.gemma import GemmaForCausalLM
from vllm_triton.models.interface import CausalLM
from vllm_triton.models.layers import Packed
from vllm_triton.models.llama import LlamaForCausalLM

# One for each of config.ARCHITECTURES.
DECODERS: Mapping[str, Callable[[ModelConfig, int, Packed], CausalLM]] = {
    "Gemma2ForCausalLM": GemmaForCausalLM,
    "Gemma3ForCausalLM": GemmaForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": LlamaForCausalLM,
    "Phi3ForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Qwen3MoeForCausalLM": LlamaForCausalLM,
}


def make_model(config: ModelConfig, max_positions: int, packed: Packed = MappingProxyType({})) -> CausalLM:
    """The decoder of config.architecture, without weights.

    Args:
        max_positions: rows of the tables of rotary angles, the longest sequence in tokens.
        packed: weights that stay packed.
    """
    return DECODERS[config.architecture](config, max_positions, packed)
