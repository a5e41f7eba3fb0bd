"""The sampler: stateless; the order of its steps is their meaning.

1. raw log-probabilities, of the logits as the model gave them, in float32
2. logit_bias and min_tokens
3. penalties
4. temperature, min_p, top_k, top_p, and the seeded draw, in one op
"""

import torch

from vllm_triton import ops
from vllm_triton.engine.messages import TokenLogprobs
from vllm_triton.sampling.metadata import Draw, SamplingMetadata


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[torch.Tensor, list[TokenLogprobs | None] | None]:
    """Draws one token a row.

    Args:
        logits: [B, V] floating; changed in place where they are fp32.
    Returns: tokens [B] int64 on the device, and per row its log-probabilities where it asked for them.
    """
    if metadata.is_plain:
        return draw(logits, metadata.draw), None
    logits = logits.float()
    raw = torch.log_softmax(logits[metadata.logprob_rows], dim=-1) if metadata.logprob_rows is not None else None
    if metadata.bias is not None:
        ops.apply_logit_bias(logits, metadata.bias.rows, metadata.bias.token_ids, metadata.bias.values)
    if metadata.penalties is not None:
        penalties = metadata.penalties
        ops.apply_penalties(
            logits,
            penalties.history,
            penalties.prompt_lens,
            penalties.total_lens,
            penalties.repetition,
            penalties.frequency,
            penalties.presence,
        )
    tokens = draw(logits, metadata.draw)
    return tokens, None if raw is None else _gather_logprobs(raw, tokens, metadata)


def draw(logits: torch.Tensor, arguments: Draw) -> torch.Tensor:
    """The last step alone: tokens [B] int64 of logits [B, V]."""
    return ops.sample_tokens(
        logits,
        arguments.temperature,
        arguments.min_p,
        arguments.top_k,
        arguments.top_p,
        arguments.seeds,
        arguments.steps,
    )


def _gather_logprobs(raw: torch.Tensor, tokens: torch.Tensor, metadata: SamplingMetadata) -> list[TokenLogprobs | None]:
    """raw: [rows that asked, V]; one entry per row of the batch, the sampled token first."""
    sampled = tokens[metadata.logprob_rows][:, None]
    sampled_logprobs = raw.gather(1, sampled)
    ranks = (raw > sampled_logprobs).sum(dim=-1) + 1
    top = raw.topk(max(metadata.num_logprobs), dim=-1)
    results: list[TokenLogprobs | None] = [None] * len(tokens)
    columns = zip(
        metadata.logprob_row_list,
        metadata.num_logprobs,
        sampled.flatten().tolist(),
        sampled_logprobs.flatten().tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        top.values.tolist(),
        strict=True,
    )
    for row, count, token, logprob, rank, top_ids, top_logprobs in columns:
        results[row] = TokenLogprobs(
            [token, *top_ids[:count]], [logprob, *top_logprobs[:count]], [rank, *range(1, count + 1)]
        )
    return results
