"""Which decoder runs a checkpoint: from config.json's `architectures` to a class."""

from collections.abc import Callable, Mapping

from vllm_triton.models.config import ModelConfig
from vllm_triton.models.gemma import GemmaForCausalLM
from vllm_triton.models.gpt_oss import GptOssForCausalLM
from vllm_triton.models.interface import CausalLM
from vllm_triton.models.llama import LlamaForCausalLM
from vllm_triton.quantization.schemes import Schemes, dense

# One for each of config.ARCHITECTURES.
DECODERS: Mapping[str, Callable[[ModelConfig, int, Schemes], CausalLM]] = {
    "Gemma2ForCausalLM": GemmaForCausalLM,
    "Gemma3ForCausalLM": GemmaForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": LlamaForCausalLM,
    "Phi3ForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Qwen3MoeForCausalLM": LlamaForCausalLM,
}


def make_model(config: ModelConfig, max_positions: int, schemes: Schemes = dense) -> CausalLM:
    """The decoder of config.architecture, without weights.

    Args:
        max_positions: rows of the tables of rotary angles, the longest sequence in tokens.
        schemes: how each layer's weight is held.
    """
    return DECODERS[config.architecture](config, max_positions, schemes)
