from typing import Any

import torch

from vllm_triton.ops.contract import FLOATS, Dims, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.sample_tokens.philox import uniform
from vllm_triton.ops.sample_tokens.reference import sample_row, sample_tokens_reference

# Results are compared exactly, in float32 against float64: no draw and no threshold may lie closer to a boundary.
_MARGIN = 1e-5


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Sampling parameters: "top_k" and "top_p" of dims for every row, or "mixed" ones with greedy rows among them."""
    num_rows, vocabulary = inputs["logits"].shape
    inputs["logits"] *= 3
    inputs["seeds"].copy_(torch.randint(0, 2**63 - 1, (num_rows,), generator=generator))
    inputs["steps"].copy_(torch.randint(0, 2**40, (num_rows,), generator=generator))
    inputs["temperature"].fill_(0.8)
    inputs["min_p"].zero_()
    inputs["top_k"].fill_(dims.get("top_k", 0))
    inputs["top_p"].fill_(dims.get("top_p_percent", 100) / 100)
    if dims.get("mixed"):
        for name, options in {
            "temperature": [0.0, 1.0, 0.3, 2.0],
            "min_p": [0.0, 0.0, 0.05, 0.3],
            "top_k": [0, 1, vocabulary // 3, vocabulary],
            "top_p": [1.0, 0.4, 0.9, 0.99],
        }.items():
            picked = torch.randint(0, 4, (num_rows,), generator=generator)
            inputs[name].copy_(torch.tensor(options)[picked])
        inputs["logits"][torch.rand(num_rows, vocabulary, generator=generator) < 0.2] = float("-inf")
        for row in range(num_rows):
            _move_off_boundaries(inputs, row)


def _move_off_boundaries(inputs: dict[str, Any], row: int) -> None:
    """Changes the row's step, top_p and min_p until a slightly different draw or threshold gives the same token."""
    logits, temperature = inputs["logits"][row].double(), float(inputs["temperature"][row])
    top_k = int(inputs["top_k"][row])
    while True:
        draw = uniform(inputs["seeds"][row], inputs["steps"][row]).double()
        min_p, top_p = float(inputs["min_p"][row]), float(inputs["top_p"][row])
        tokens = {
            sample_row(logits, temperature, min_p * (1 + change), top_k, top_p * (1 + change), moved)
            for change in (-_MARGIN, _MARGIN)
            for moved in (draw - _MARGIN, draw + _MARGIN)
            if 0 <= moved < 1
        }
        if len(tokens) == 1:
            return
        inputs["steps"][row] += 1
        inputs["min_p"][row] *= 0.97
        if top_p < 1:
            inputs["top_p"][row] *= 0.97


_PER_ROW = Tensor("B", (torch.float32,))


@define_op(
    args={
        "logits": Tensor("B V", FLOATS),
        "temperature": _PER_ROW,
        "min_p": _PER_ROW,
        "top_k": Tensor("B", (torch.int32,)),
        "top_p": _PER_ROW,
        "seeds": Tensor("B", (torch.int64,)),
        "steps": Tensor("B", (torch.int64,)),
    },
    results={"tokens": Tensor("B", (torch.int64,))},
    reference=sample_tokens_reference,
    flops=lambda dims: 4 * dims["B"] * dims["V"],
    test_dims=lambda pick: {"B": pick(1, 4), "V": pick(1, 130), "mixed": 1},
    bench_dims={
        "smollm2, temperature": {"B": 32, "V": 49152},
        "smollm2, top_k 50": {"B": 32, "V": 49152, "top_k": 50},
        "llama-3, temperature": {"B": 32, "V": 128256},
        "qwen3, top_k 50, top_p 0.9": {"B": 32, "V": 151936, "top_k": 50, "top_p_percent": 90},
    },
    arrange=_arrange,
    rows="B",
)
def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    """Draws one token per row: temperature, then min_p, top_k and top_p, then one uniform number against the CDF.

        w[v] = exp((logits[b, v] - max_v logits[b, v]) / temperature[b])
        keep v where w[v] >= min_p[b], where logits[b, v] >= the top_k[b]-th largest logit, and where of what those
            keep, the mass of strictly greater logits is below top_p[b]
        tokens[b] = the first v with sum_{i <= v kept} w[i] > uniform(seeds[b], steps[b]) * sum_{i kept} w[i]

    Tokens with equal logits are kept or dropped together. A row's token depends on that row's arguments alone.

    Args:
        logits: [B, V] fp16, bf16 or fp32; minus infinity and NaN are never drawn; a row of nothing else gives token 0.
        temperature: [B] fp32, >= 0; below 1e-5 the row takes its largest logit, the first of equal ones.
        min_p: [B] fp32, 0 .. 1; 0 keeps all.
        top_k: [B] int32, >= 0; 0 keeps all, and so does V or more.
        top_p: [B] fp32, 0 < top_p <= 1; 1 keeps all.
        seeds, steps: [B] int64, key and counter of Philox4x32-10.
    Returns: [B] int64, 0 .. V - 1; computes in fp32.
    Mutates: nothing.
    Raises: ShapeError, DTypeError.
    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (top-p); Fan et al., "Hierarchical Neural
        Story Generation" (top-k); Nguyen et al., "Min-p Sampling for Creative and Coherent LLM Outputs"; Salmon et al.,
        "Parallel Random Numbers: As Easy as 1, 2, 3" (Philox).
    """
