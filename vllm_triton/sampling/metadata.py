"""What the sampler needs to know about the rows of one step, as tensors on the device."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_triton.runner.buffers import InputBuffer
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
class Draw:
    """What each row's draw depends on, beside its logits.

    steps: output tokens before this one, so that a seed gives each its own draw.
    """

    temperature: torch.Tensor  # [B] fp32
    min_p: torch.Tensor  # [B] fp32
    top_k: torch.Tensor  # [B] int32
    top_p: torch.Tensor  # [B] fp32
    seeds: torch.Tensor  # [B] int64
    steps: torch.Tensor  # [B] int64


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows are those of the logits."""

    draw: Draw
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    allowed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # row, its token ids
    logprob_rows: torch.Tensor | None = None  # [rows that asked] int64
    logprob_row_list: list[int] = field(default_factory=list)
    num_logprobs: list[int] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the logits as they are, and nothing else is asked of them."""
        return self.bias is None and self.penalties is None and not self.allowed and self.logprob_rows is None


class SamplingBuffers:
    """The draw's arguments at fixed addresses, one row for each request of the largest batch."""

    def __init__(self, max_num_seqs: int, device: torch.device):
        dtypes = {"temperature": torch.float32, "min_p": torch.float32, "top_k": torch.int32, "top_p": torch.float32}
        dtypes |= {"seeds": torch.int64, "steps": torch.int64}
        self._buffers = {name: InputBuffer(max_num_seqs, dtype=dtype, device=device) for name, dtype in dtypes.items()}
        # Version of the batch and size of the last write, if all rows sampled and nothing else was asked of them.
        self.plain: tuple[int, int] | None = None

    def write(self, columns: dict[str, np.ndarray], size: int) -> Draw:
        """Args: columns: of the rows that sample. size: rows that are drawn; those beyond take their largest logit."""
        for name, values in columns.items():
            self._buffers[name].np[: len(values)] = values
        self._buffers["temperature"].np[len(columns["temperature"]) : size] = 0
        return self.upload(size)

    def write_steps(self, steps: np.ndarray, size: int) -> Draw:
        """Where nothing else has changed since the last write."""
        self._buffers["steps"].np[: len(steps)] = steps
        return self.upload(size)

    def upload(self, size: int) -> Draw:
        return Draw(**{name: buffer.upload(size) for name, buffer in self._buffers.items()})


def build_sampling_metadata(
    batch: InputBatch, rows: np.ndarray, buffers: SamplingBuffers, size: int, device: torch.device
) -> SamplingMetadata:
    """Writes the draw's arguments into `buffers`, and collects the rest.

    Args:
        rows: rows of the batch that sample in this step, in the order of the logits.
        size: rows of the logits, at least as many.
    """

    same = (batch.version, size) if len(rows) == len(batch) else None
    if same is not None and same == buffers.plain:
        count = len(batch)
        return SamplingMetadata(buffers.write_steps(batch.num_tokens[:count] - batch.num_prompt_tokens[:count], size))

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device, non_blocking=True)

    row_list = rows.tolist()
    params = [batch.params[row] for row in row_list]
    steps = (batch.num_tokens - batch.num_prompt_tokens).astype(np.int64)
    logprob_rows = [index for index, p in enumerate(params) if p.logprobs is not None]
    columns: dict[str, np.ndarray] = {
        "temperature": batch.temperature[rows],
        "min_p": batch.min_p[rows],
        "top_k": batch.top_k[rows],
        "top_p": batch.top_p[rows],
        "seeds": batch.seed[rows],
        "steps": steps[rows],
    }
    metadata = SamplingMetadata(
        draw=buffers.write(columns, size),
        bias=_logit_bias(batch, row_list, steps, device),
        penalties=_penalties(batch, rows, column),
        allowed=[(index, tuple(p.allowed_token_ids)) for index, p in enumerate(params) if p.allowed_token_ids],
        logprob_rows=torch.tensor(logprob_rows, device=device) if logprob_rows else None,
        logprob_row_list=logprob_rows,
        num_logprobs=[params[index].logprobs or 0 for index in logprob_rows],
    )
    # What bad words forbid depends on the text so far.
    stays_plain = metadata.is_plain and not any(p.bad_words_token_ids for p in params)
    buffers.plain = same if stays_plain else None
    return metadata


def _logit_bias(batch: InputBatch, rows: list[int], steps: np.ndarray, device: torch.device) -> LogitBias | None:
    entries: list[tuple[int, int, float]] = []
    for index, row in enumerate(rows):
        params = batch.params[row]
        if not params.logit_bias and not params.min_tokens and not params.bad_words_token_ids:
            continue
        bias = dict(params.logit_bias)
        text = batch.token_ids[row, : batch.num_tokens[row]]
        output = text[batch.num_prompt_tokens[row] :]
        bias.update((ids[-1], float("-inf")) for ids in params.bad_words_token_ids if _ends_with(output, ids[:-1]))
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


def _ends_with(tokens: np.ndarray, ending: list[int]) -> bool:
    return len(tokens) >= len(ending) and tokens[len(tokens) - len(ending) :].tolist() == ending


def _penalties(batch: InputBatch, rows: np.ndarray, column) -> Penalties | None:
    wanted = batch.is_penalised[rows]
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
