from typing import Any

import torch

from vllm_triton.ops.apply_penalties.reference import apply_penalties_reference
from vllm_triton.ops.contract import Dims, Tensor
from vllm_triton.ops.registry import define_op


def _history(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """Few distinct tokens, so that they repeat."""
    return torch.randint(0, max(dims["V"] // 4, 1), (dims["B"], dims["L"]), generator=generator)


def _uniform(low: float, high: float) -> Any:
    return lambda dims, generator: low + (high - low) * torch.rand(dims["B"], generator=generator)


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Any lengths; tokens beyond them outside the vocabulary; a quarter of the rows without penalties."""
    draws = torch.rand(3, dims["B"], generator=generator)
    total = (draws[0] * (dims["L"] + 1)).long()
    inputs["total_lens"].copy_(total)
    inputs["prompt_lens"].copy_((draws[1] * (total + 1)).long())
    beyond = torch.arange(dims["L"])[None, :] >= total[:, None]
    inputs["history"][beyond] = 2**31 - 1
    for name, neutral in (("repetition", 1.0), ("frequency", 0.0), ("presence", 0.0)):
        inputs[name][draws[2] < 0.25] = neutral


@define_op(
    args={
        "logits": Tensor("B V", (torch.float32,), mutated=True),
        "history": Tensor("B L", (torch.int32,), values=_history),
        "prompt_lens": Tensor("B", (torch.int32,)),
        "total_lens": Tensor("B", (torch.int32,)),
        "repetition": Tensor("B", (torch.float32,), values=_uniform(0.5, 2)),
        "frequency": Tensor("B", (torch.float32,), values=_uniform(-2, 2)),
        "presence": Tensor("B", (torch.float32,), values=_uniform(-2, 2)),
    },
    reference=apply_penalties_reference,
    flops=lambda dims: 4 * dims["B"] * dims["L"],
    bytes=lambda dims, itemsize: dims["B"] * dims["L"] * (2 * itemsize + 4),
    test_dims=lambda pick: {"B": pick(1, 4), "V": pick(1, 130), "L": pick(1, 130)},
    bench_dims={"32 rows of 512 tokens": {"B": 32, "V": 49152, "L": 512}},
    arrange=_arrange,
    rows="B",
)
def apply_penalties(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Repetition, then frequency and presence penalties on the tokens that a row has seen.

        x[b, v] = logits[b, v] / repetition[b] if logits[b, v] > 0 else logits[b, v] * repetition[b]  (v in history[b])
        x[b, v] -= frequency[b] * count[b, v] + presence[b]                                   (count[b, v] > 0)

    where count[b, v] is how often v stands in the output, positions prompt_lens[b] .. total_lens[b] - 1 of the history.

    Args:
        logits: [B, V] fp32.
        history: [B, L] int32, prompt and then output; tokens beyond total_lens are ignored and may be anything.
        prompt_lens, total_lens: [B] int32, tokens; prompt_lens <= total_lens <= L.
        repetition: [B] fp32, > 0; 1 for none.
        frequency, presence: [B] fp32, natural-log units; 0 for none.
    Returns: nothing.
    Mutates: logits.
    Raises: ShapeError, DTypeError.
    Source: Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation", section 4.1;
        OpenAI's API reference, "Frequency and presence penalties".
    """
