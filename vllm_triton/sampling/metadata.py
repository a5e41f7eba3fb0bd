"""What the sampler needs to know about the rows of one step, as tensors on the device."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_triton.runner.input_batch import InputBatch


@dataclass(frozen=True)
class LogitBias:
    """One entry per pair of row and token: rows, token_ids int64, values fp32, each [N]."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Penalties:
    """history: [B, L] int32, prompt then output; the rest [B]: lengths int32, strengths fp32."""

    history: torch.Tensor
    prompt_lens: torch.Tensor
    total_lens: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows are those of the logits. steps: output tokens before this one, so that a seed gives each its own draw."""

    temperature: torch.Tensor  # [B] fp32
    top_p: torch.Tensor  # [B] fp32
    top_k: torch.Tensor  # [B] int32
    min_p: torch.Tensor  # [B] fp32
    seeds: torch.Tensor  # [B] int64
    steps: torch.Tensor  # [B] int64
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    logprob_rows: torch.Tensor | None = None  # [rows that asked] int64
    logprob_row_list: list[int] = field(default_factory=list)
    num_logprobs: list[int] = field(default_factory=list)


def build_sampling_metadata(batch: InputBatch, rows: np.ndarray, device: torch.device) -> SamplingMetadata:
    """Args: rows: rows of the batch that sample in this step, in the order of the logits."""

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device, non_blocking=True)

    row_list = rows.tolist()
    params = [batch.params[row] for row in row_list]
    steps = (batch.num_tokens - batch.num_prompt_tokens).astype(np.int64)
    logprob_rows = [index for index, p in enumerate(params) if p.logprobs is not None]
    return SamplingMetadata(
        temperature=column(batch.temperature),
        top_p=column(batch.top_p),
        top_k=column(batch.top_k),
        min_p=column(batch.min_p),
        seeds=column(batch.seed),
        steps=column(steps),
        bias=_logit_bias(batch, row_list, steps, device),
        penalties=_penalties(batch, rows, column),
        logprob_rows=torch.tensor(logprob_rows, device=device) if logprob_rows else None,
        logprob_row_list=logprob_rows,
        num_logprobs=[params[index].logprobs or 0 for index in logprob_rows],
    )


def _logit_bias(batch: InputBatch, rows: list[int], steps: np.ndarray, device: torch.device) -> LogitBias | None:
    entries: list[tuple[int, int, float]] = []
    for index, row in enumerate(rows):
        params = batch.params[row]
        if not params.logit_bias and not params.min_tokens:
            continue
        bias = dict(params.logit_bias)
        if steps[row] < params.min_tokens:
            bias.update(dict.fromkeys(batch.stop_token_ids[row], float("-inf")))
        entries.extend((index, token, value) for token, value in bias.items())
    if not entries:
        return None
    indices, tokens, values = zip(*entries, strict=True)
    return LogitBias(
        torch.tensor(indices, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _penalties(batch: InputBatch, rows: np.ndarray, column) -> Penalties | None:
    wanted = (
        (batch.repetition_penalty[rows] != 1)
        | (batch.frequency_penalty[rows] != 0)
        | (batch.presence_penalty[rows] != 0)
    )
    if not wanted.any():
        return None
    # Rows without penalties get an empty history.
    total_lens = np.where(wanted, batch.num_tokens[rows], 0).astype(np.int32)
    longest = int(total_lens.max())
    device = column(batch.top_k).device
    return Penalties(
        history=column(batch.token_ids[:, :longest]),
        prompt_lens=column(batch.num_prompt_tokens),
        total_lens=torch.from_numpy(total_lens).to(device),
        repetition=column(batch.repetition_penalty),
        frequency=column(batch.frequency_penalty),
        presence=column(batch.presence_penalty),
    )
