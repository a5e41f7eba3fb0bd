"""The model runner: applies the scheduler's output to the persistent batch, runs the model, draws the tokens."""

import contextlib
from dataclasses import dataclass

import numpy as np
import torch

from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.llama import KVCache, LlamaForCausalLM
from vllm_triton.ops import registry
from vllm_triton.runner.buffers import InputBuffer
from vllm_triton.runner.input_batch import InputBatch
from vllm_triton.sampling.metadata import build_sampling_metadata
from vllm_triton.sampling.sampler import sample
from vllm_triton.scheduler.output import RunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class StepInputs:
    """What the model reads in one step.

    sampling_rows: rows of the batch whose last known token is computed in this step, so that they get a next one.
    logits_indices: [rows that sample] int64, the position of that token among the step's.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    attention: AttentionMetadata
    sampling_rows: np.ndarray
    logits_indices: torch.Tensor


class ModelRunner:
    """Args: sizes as in EngineConfig."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_caches: list[KVCache],
        device: torch.device,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ):
        self.model = model
        self.kv_caches = kv_caches
        self.device = device
        self.block_size = block_size
        self.batch = InputBatch(max_num_seqs, max_model_len, block_size)
        self._ran_checked = False

        def buffer(*shape: int, dtype: torch.dtype) -> InputBuffer:
            return InputBuffer(*shape, dtype=dtype, device=device)

        self._token_ids = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._positions = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._slot_mapping = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._logits_indices = buffer(max_num_seqs, dtype=torch.int64)
        self._query_start_loc = buffer(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = buffer(max_num_seqs, dtype=torch.int32)
        self._block_table = buffer(max_num_seqs, self.batch.max_blocks, dtype=torch.int32)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """One step: the scheduled tokens of all rows, and a next token for each row that has caught up."""
        self.batch.apply(output)
        if output.total_num_scheduled_tokens == 0:
            return RunnerOutput()
        inputs = self._prepare(output)
        # The first step shows that model and ops fit together; later ones differ only in the numbers of rows.
        with registry.trusted_calls() if self._ran_checked else contextlib.nullcontext():
            hidden = self.model(inputs.token_ids, inputs.positions, inputs.attention, self.kv_caches)
        self._ran_checked = True
        return self._sample(hidden, inputs)

    def _prepare(self, output: SchedulerOutput) -> StepInputs:
        batch, num_rows, num_tokens = self.batch, len(self.batch), output.total_num_scheduled_tokens
        scheduled = output.num_scheduled_tokens
        counts = np.fromiter((scheduled.get(name, 0) for name in batch.request_ids), dtype=np.int32, count=num_rows)
        computed = batch.num_computed_tokens[:num_rows]

        starts = self._query_start_loc.np
        starts[0] = 0
        np.cumsum(counts, out=starts[1 : num_rows + 1])
        rows = np.repeat(np.arange(num_rows), counts)
        positions = self._positions.np[:num_tokens]
        np.subtract(np.arange(num_tokens), np.repeat(starts[:num_rows] - computed, counts), out=positions)
        self._token_ids.np[:num_tokens] = batch.token_ids[rows, positions]
        blocks = batch.block_table[rows, positions // self.block_size]
        self._slot_mapping.np[:num_tokens] = blocks.astype(np.int64) * self.block_size + positions % self.block_size

        seq_lens = self._seq_lens.np[:num_rows]
        np.add(computed, counts, out=seq_lens)
        # Wide enough for the longest sequence here, so that the host copies and the CPU's gather touch no more.
        width = max(-(-int(seq_lens.max()) // self.block_size), 1)
        self._block_table.np[:num_rows, :width] = batch.block_table[:num_rows, :width]
        sampling_rows = np.flatnonzero((seq_lens == batch.num_tokens[:num_rows]) & (counts > 0))
        self._logits_indices.np[: len(sampling_rows)] = starts[sampling_rows + 1] - 1

        computed += counts
        attention = AttentionMetadata(
            slot_mapping=self._slot_mapping.upload(num_tokens),
            block_table=self._block_table.upload(num_rows)[:, :width],
            seq_lens=self._seq_lens.upload(num_rows),
            query_start_loc=self._query_start_loc.upload(num_rows + 1),
        )
        return StepInputs(
            token_ids=self._token_ids.upload(num_tokens),
            positions=self._positions.upload(num_tokens),
            attention=attention,
            sampling_rows=sampling_rows,
            logits_indices=self._logits_indices.upload(len(sampling_rows)),
        )

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> RunnerOutput:
        rows = inputs.sampling_rows
        if len(rows) == 0:
            return RunnerOutput()
        logits = self.model.compute_logits(hidden[inputs.logits_indices])
        metadata = build_sampling_metadata(self.batch, rows, self.device)
        tokens, logprobs = sample(logits, metadata)
        request_ids = [self.batch.request_ids[row] for row in rows.tolist()]
        sampled = tokens[:, None].tolist()
        for row, new_tokens in zip(rows.tolist(), sampled, strict=True):
            self.batch.append_tokens(row, new_tokens)
        by_request = {
            name: [entry]
            for name, entry in zip(request_ids, logprobs or [], strict=bool(logprobs))
            if entry is not None
        }
        return RunnerOutput(request_ids, sampled, by_request)
