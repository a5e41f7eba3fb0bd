"""The table of cosines and sines that rotary_embedding reads, for every kind of frequency scaling.

Formulas: Su et al., "RoFormer"; linear: Chen et al., "Extending Context Window of Large Language Models via Positional
Interpolation"; yarn: Peng et al., "YaRN"; llama3: the smoothed scaling published with Llama 3.1; longrope: Ding et
al., "LongRoPE".
"""

import math

import torch

from vllm_triton.models.config import RopeConfig


def cos_sin_table(rope: RopeConfig, num_positions: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[num_positions, rotary_size] fp32: cosines of all frequencies, then sines.

    A longrope has other frequencies for texts longer than it was trained with first. Keys in the cache cannot be turned
    again when a text grows beyond, so num_positions decides, once for all texts.
    """
    frequencies, attention_factor = _frequencies(rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(attention_factor).to(device)


def _frequencies(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """([rotary_size / 2] radians per position, factor on cosines and sines)."""
    exponents = torch.arange(0, rope.rotary_size, 2, dtype=torch.float32) / rope.rotary_size
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope)
    if rope.kind == "longrope":
        return _longrope(base, rope, num_positions)
    return base, 1.0


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are divided by factor, short ones kept, those between blended."""
    factor = rope.parameters["factor"]
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    turns = rope.parameters["original_max_position_embeddings"] * base / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * base + (1 - keep) * base / factor


def _longrope(base: torch.Tensor, rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """Each frequency is divided by a factor of its own, from a list for short texts or one for long ones."""
    parameters = rope.parameters
    original = parameters["original_max_position_embeddings"]
    divisors = torch.tensor(parameters["long_factor" if num_positions > original else "short_factor"])
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        stretch = parameters.get("factor") or rope.max_position / original
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return base / divisors, attention_factor


def _yarn(base: torch.Tensor, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    parameters = rope.parameters
    original = parameters.get("original_max_position_embeddings") or rope.max_position
    factor = parameters["factor"]

    def dimension(turns: float) -> float:
        """The index of the frequency that turns this many times within the original context."""
        return rope.rotary_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_size - 1)
    ramp = (torch.arange(len(base), dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolate = ramp.clamp(0, 1)
    frequencies = base / factor * interpolate + base * (1 - interpolate)
    return frequencies, _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: dict[str, float], factor: float) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)
