from typing import Any

import torch

from vllm_triton.ops.contract import Dims, Tensor
from vllm_triton.ops.registry import define_op
from vllm_triton.ops.rejection_sample.reference import outcome_is_certain, rejection_sample_reference


def _probabilities(dims: Dims, generator: torch.Generator) -> torch.Tensor:
    """Rows that sum to 1, with zeros as top_k and top_p leave them."""
    logits = 2 * torch.randn(dims["N"], dims["V"], generator=generator)
    dropped = torch.rand(logits.shape, generator=generator) < 0.3
    dropped.scatter_(1, logits.argmax(dim=1, keepdim=True), False)
    return logits.masked_fill_(dropped, float("-inf")).softmax(dim=-1)


def _arrange(inputs: dict[str, Any], dims: Dims, generator: torch.Generator) -> None:
    """Drafts of any length, drawn from their own distribution where it is given; draws that rounding cannot turn."""
    num_rows, num_drafts, most = dims["B"], dims["N"], dims["S"]
    lengths, left = [], num_drafts
    for _ in range(num_rows):
        length = min(int(torch.randint(0, most + 1, (), generator=generator)), left)
        lengths.append(length)
        left -= length
    inputs["draft_start_loc"].copy_(torch.tensor([0, *lengths]).cumsum(0))
    drafted_from = inputs["draft_probs"]
    if num_drafts:
        source = inputs["target_probs"] if dims.get("certain") else drafted_from
        inputs["draft_tokens"].copy_(torch.multinomial(source, 1, generator=generator)[:, 0])
    inputs["bonus_tokens"].copy_(torch.randint(0, dims["V"], (num_rows,), generator=generator))
    inputs["is_greedy"].copy_(torch.rand(num_rows, generator=generator) < 0.3)
    inputs["seeds"].copy_(torch.randint(0, 2**63 - 1, (num_rows,), generator=generator))
    inputs["steps"].copy_(torch.randint(0, 2**40, (num_rows,), generator=generator))
    if dims.get("certain"):
        inputs["draft_probs"] = None
    inputs["out"].fill_(-7)
    while not outcome_is_certain(*inputs.values()):
        inputs["steps"] += 1


_LONG, _FLOAT = (torch.int64,), (torch.float32,)


@define_op(
    args={
        "out": Tensor("B S+1", _LONG, mutated=True),
        "draft_tokens": Tensor("N", _LONG),
        "draft_start_loc": Tensor("B+1", (torch.int32,)),
        "target_probs": Tensor("N V", _FLOAT, values=_probabilities),
        "draft_probs": Tensor("N V", _FLOAT, optional=True, values=_probabilities),
        "bonus_tokens": Tensor("B", _LONG),
        "is_greedy": Tensor("B", (torch.bool,)),
        "seeds": Tensor("B", _LONG),
        "steps": Tensor("B", _LONG),
    },
    reference=rejection_sample_reference,
    bytes=lambda dims, itemsize: dims["N"] * dims["V"] * 8,
    test_dims=lambda pick: {
        "B": pick(1, 4),
        "S": pick(1, 4),
        "N": pick(0, 12),
        "V": pick(1, 130),
        "certain": pick(0, 1),
    },
    bench_dims={"32 drafts of 4": {"B": 32, "S": 4, "N": 128, "V": 49152}},
    arrange=_arrange,
)
def rejection_sample(
    out: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_start_loc: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    bonus_tokens: torch.Tensor,
    is_greedy: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> None:
    """Keeps the drafted tokens that the target model agrees with, and one token of its own after them.

    Draft i of a row, token d, is kept, as long as all before it were, where
        greedy: d = argmax target[i]             else: uniform * draft[i, d] < target[i, d]
    The first that is not kept is replaced and ends the row:
        greedy: argmax target[i]                 else: drawn in proportion to max(target[i] - draft[i], 0)
    A row whose drafts are all kept ends with its bonus token. Tokens are distributed as if the target drew them alone.

    Args:
        out: [B, S + 1] int64, written: each row's tokens, then -1.
        draft_tokens: [N] int64, 0 .. V - 1, row after row; at most S a row.
        draft_start_loc: [B + 1] int32, non-decreasing from 0: row b has drafts draft_start_loc[b] .. [b + 1] - 1;
            drafts from draft_start_loc[B] on are padding.
        target_probs: [N, V] fp32, the target's probabilities at each draft, after temperature, top_k and so on.
        draft_probs: [N, V] fp32, what the drafts were drawn from; None where they were certain (n-grams).
        bonus_tokens: [B] int64, the target's token after all drafts.
        is_greedy: [B] bool; of equal probabilities the first token is the largest.
        seeds, steps: [B] int64, key and counter of Philox4x32-10; draft i takes the counters after steps that
            rejection_sample.philox says, so that no draw of sample_tokens is met again.
    Returns: nothing; computes in fp32.
    Mutates: out.
    Raises: ShapeError, DTypeError.
    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    """
