"""Tiny random models of each family, written as Hugging Face folders by transformers.

Families have equal sizes where their point is another, since natively each size compiles kernels of its own. Sizes that
fill no block of a kernel are those of llama2 (80) and of the Qwen3s (heads of 20, experts of 36).
"""

from pathlib import Path
from typing import Any

import torch

from vllm_triton import LLM
from vllm_triton.models.attention_metadata import AttentionMetadata

VOCAB_SIZE = 199
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # far from uniform logits, so that greedy tokens vary
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Heads that are not hidden_size in all.
_WIDE_HEADS = {"num_attention_heads": 4, "head_dim": 16}
_GEMMA = _WIDE_HEADS | {"query_pre_attn_scalar": 20, "sliding_window": 11, "sliding_window_pattern": 2}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
# 12 of 16 dimensions are turned; a text of more than 64 tokens is long.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.2, 1.9, 3.0, 5.0, 8.0, 11.0],
}
_PHI4 = {"hidden_size": 64, "num_attention_heads": 4, "original_max_position_embeddings": 64}
# No whole number of dimensions bounds the frequencies that are blended.
_GPT_OSS_ROPE = _YARN_ROPE | {"rope_theta": 150000.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
_GPT_OSS = _WIDE_HEADS | {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2}
_QWEN3_MOE = {"head_dim": 20, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 36}

# name -> (transformers' model, what differs from _COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 6, "intermediate_size": 80, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-yarn-bias": ("Llama", {"rope_parameters": _YARN_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral": ("Mistral", _WIDE_HEADS | {"sliding_window": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "gemma2": ("Gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", _GEMMA | {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3-scaled": ("Gemma3", _GEMMA | {"rope_parameters": _GEMMA_ROPES, "hidden_activation": "gelu"}),
    "phi3": ("Phi3", {"sliding_window": 13}),
    "phi4": ("Phi3", _PHI4 | {"tie_word_embeddings": True, "rope_parameters": _LONGROPE}),
    "qwen3": ("Qwen3", {"head_dim": 20, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}),
    "qwen3-moe": ("Qwen3Moe", _QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gpt-oss": ("GptOss", _GPT_OSS | {"rope_parameters": _GPT_OSS_ROPE, "swiglu_limit": 1.5}),
    "qwen3-moe-window": ("Qwen3Moe", _QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 9}),
}


def make_tiny(family: str, folder: Path, seed: int = 0, max_shard_size: str = "5GB") -> Any:
    """Writes the model in float32 and returns transformers' own copy of it."""
    import transformers

    name, different = FAMILIES[family]
    config_class = getattr(transformers, f"{name}{'TextConfig' if name == 'Gemma3' else 'Config'}")
    config = config_class(**(_COMMON | different))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                # Gemma's are added to 1.
                parameter.normal_(0.0 if name.startswith("Gemma") else 1.0, 0.2)
            elif parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.3)
        if name.startswith("Gemma") and config.tie_word_embeddings:
            # Else the head would find the token again that was scaled on the way in.
            model.get_input_embeddings().weight.mul_(0.1 * config.hidden_size**-0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@torch.inference_mode()
def prompt_logits(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """[T, V] of one prompt, computed outside the engine's loop into blocks 1, 2, ..."""
    runner, count = llm.core.runner, len(token_ids)
    positions = torch.arange(count)
    blocks = torch.arange(1, -(-count // runner.block_size) + 1, dtype=torch.int32)[None]
    attention = AttentionMetadata(
        slot_mapping=positions + runner.block_size,
        block_table=blocks,
        seq_lens=torch.tensor([count], dtype=torch.int32),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
    )
    hidden = runner.model(torch.tensor(token_ids), positions, attention, runner.kv_caches)
    return runner.model.compute_logits(hidden)


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates, without an end-of-sequence token."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
    return out[0, len(prompt) :].tolist()
