"""The sampler: stateless; the order of its steps is their meaning.

1. raw log-probabilities, of the logits as the model gave them, in float32
2. the list of allowed tokens; here a grammar's mask would join
3. bad words, min_tokens and logit_bias
4. penalties
5. temperature, min_p, top_k, top_p, and the seeded draw, in one op

Passes over the vocabulary, beside the conversion to float32: log-probabilities read the rows that ask for them once and
look for the most likely ones once; a list of allowed tokens writes its rows once; bias, bad words and penalties touch
their own tokens alone; the draw reads a greedy row once, another three times, and up to 16 times more for top_k and
for top_p each, of which blocks below the floor found so far are passed over.
"""

import functools

import numpy as np
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
    raw = logits[metadata.logprob_rows] if metadata.logprob_rows is not None else None  # a copy
    if metadata.allowed:
        rows, lists = zip(*metadata.allowed, strict=True)
        bitmask = np.stack([_bitmask(token_ids, logits.shape[1]) for token_ids in lists])
        places = torch.tensor(rows, device=logits.device)
        ops.apply_token_bitmask(logits, torch.from_numpy(bitmask).to(logits.device), places)
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


@functools.lru_cache(maxsize=256)
def _bitmask(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Words of 32 bits, one bit a token, set for these."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


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
    """raw: logits [rows that asked, V]; one entry per row of the batch, the sampled token first."""
    sampled = tokens[metadata.logprob_rows]
    sampled_logprobs, ranks, lse = ops.token_logprobs(raw, sampled)
    top = raw.topk(max(metadata.num_logprobs), dim=-1)
    results: list[TokenLogprobs | None] = [None] * len(tokens)
    columns = zip(
        metadata.logprob_row_list,
        metadata.num_logprobs,
        sampled.tolist(),
        sampled_logprobs.tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        (top.values - lse[:, None]).tolist(),
        strict=True,
    )
    for row, count, token, logprob, rank, top_ids, top_logprobs in columns:
        results[row] = TokenLogprobs(
            [token, *top_ids[:count]], [logprob, *top_logprobs[:count]], [rank, *range(1, count + 1)]
        )
    return results
