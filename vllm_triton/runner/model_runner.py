"""The model runner: applies the scheduler's output to the persistent batch, runs the model, draws the tokens."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_triton.compile.graphs.backend import Graph, GraphBackend
from vllm_triton.compile.graphs.modes import BatchDescriptor, Dispatch, Dispatcher, RuntimeMode
from vllm_triton.compile.pieces.program import Program
from vllm_triton.engine.messages import TokenLogprobs
from vllm_triton.models.attention_metadata import AttentionMetadata
from vllm_triton.models.interface import CausalLM, KVCache
from vllm_triton.ops import registry
from vllm_triton.runner.buffers import InputBuffer
from vllm_triton.runner.input_batch import InputBatch
from vllm_triton.sampling.metadata import SamplingBuffers, build_sampling_metadata
from vllm_triton.sampling.sampler import draw, sample
from vllm_triton.scheduler.output import RunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class ModelInputs:
    """What the model reads."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    attention: AttentionMetadata

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order of the fields."""
        return self.token_ids, self.positions, *vars(self.attention).values()


@dataclass(frozen=True)
class StepInputs:
    """One step.

    dispatch: the graph that runs it, to whose size the model's inputs are padded, or none.
    sampling_rows: rows of the batch whose last known token is computed in this step, so that they get a next one.
    logits_indices: [rows that sample] int64, the position of that token among the step's; None where a graph of the
        whole step knows it.
    """

    dispatch: Dispatch
    model: ModelInputs
    sampling_rows: np.ndarray
    logits_indices: torch.Tensor | None


@dataclass(frozen=True)
class DecodeGraphs:
    """A step of one token for each of so many requests.

    forward: gives logits, for steps in which more happens to them before the draw. step: gives tokens.
    """

    forward: Graph
    step: Graph


class ModelRunner:
    """Args: sizes as in EngineConfig."""

    def __init__(
        self,
        model: CausalLM,
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
        self._program: Program | None = None
        self._graphs: dict[int, DecodeGraphs] = {}
        self._captured: dict[RuntimeMode, list[int]] = {}
        self._dispatcher = Dispatcher(self._captured)

        def buffer(*shape: int, dtype: torch.dtype) -> InputBuffer:
            return InputBuffer(*shape, dtype=dtype, device=device)

        self._token_ids = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._positions = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._slot_mapping = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._logits_indices = buffer(max_num_seqs, dtype=torch.int64)
        self._query_start_loc = buffer(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = buffer(max_num_seqs, dtype=torch.int32)
        self._block_table = buffer(max_num_seqs, self.batch.max_blocks, dtype=torch.int32)
        self.sampling_buffers = SamplingBuffers(max_num_seqs, device)
        self._ones, self._numbers = np.ones(max_num_seqs, np.int32), np.arange(max_num_seqs + 1)

    def use(self, program: Program) -> None:
        """Runs the forward as this program from now on, instead of calling the model."""
        self._program = program

    @torch.inference_mode()
    def capture_decoding(self, backend: GraphBackend, sizes: Iterable[int]) -> None:
        """Captures whole steps of one token a request, for so many requests each.

        Largest first: what a graph needs of the memory that all share, the next ones find there.

        Raises: CaptureError, which names what cannot be captured.
        """
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._capture_decoding(backend, size)
        self._dispatch_to(RuntimeMode.FULL, sizes)

    def _capture_decoding(self, backend: GraphBackend, size: int) -> DecodeGraphs:
        inputs, arguments = self.model_inputs(size, size, self.batch.max_blocks), self.sampling_buffers.upload(size)
        step = Dispatch(RuntimeMode.FULL, BatchDescriptor(size, size, uniform=True))

        def forward() -> tuple[torch.Tensor, ...]:
            return (self.model.compute_logits(self._forward(inputs, step)),)

        def draw_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (draw(logits, arguments),)

        graphs, _ = backend.capture(f"decode {size}", forward, draw_tokens)
        return DecodeGraphs(*graphs)

    @torch.inference_mode()
    def capture_pieces(self, backend: GraphBackend, sizes: Iterable[int]) -> None:
        """Captures what lies between attention, for steps of so many tokens each; largest first, see above.

        Raises: CaptureError, which names what cannot be captured.
        """
        for size in sorted(sizes, reverse=True):
            self._pad(0, 0, size)  # attention runs beside the pieces that are captured, on nobody
            step = Dispatch(RuntimeMode.PIECEWISE, BatchDescriptor(size), captures_into=backend)
            self._forward(self.model_inputs(size, 1, self.batch.max_blocks), step)
        self._dispatch_to(RuntimeMode.PIECEWISE, sizes)

    def _dispatch_to(self, mode: RuntimeMode, sizes: Iterable[int]) -> None:
        self._captured[mode] = sorted(sizes)
        self._dispatcher = Dispatcher(self._captured)

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """One step: the scheduled tokens of all rows, and a next token for each row that has caught up."""
        self.batch.apply(output)
        if output.total_num_scheduled_tokens == 0:
            return RunnerOutput()
        inputs = self._prepare(output)
        if inputs.dispatch.mode is RuntimeMode.FULL:
            return self._decode(inputs)
        with torch.inference_mode():
            return self._sample(self._forward(inputs.model, inputs.dispatch), inputs)

    def _forward(self, inputs: ModelInputs, step: Dispatch) -> torch.Tensor:
        if self._program is not None:
            return self._program(step, len(inputs.token_ids), *inputs.tensors())
        # The first call shows that model and ops fit together; later ones differ only in the numbers of rows.
        with registry.trusted_calls() if self._ran_checked else contextlib.nullcontext():
            hidden = self.model(inputs.token_ids, inputs.positions, inputs.attention, self.kv_caches)
        self._ran_checked = True
        return hidden

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> RunnerOutput:
        rows = inputs.sampling_rows
        if len(rows) == 0:
            return RunnerOutput()
        logits = self.model.compute_logits(hidden[inputs.logits_indices])
        metadata = build_sampling_metadata(self.batch, rows, self.sampling_buffers, len(rows), self.device)
        return self._finish(rows, *sample(logits, metadata))

    def _decode(self, inputs: StepInputs) -> RunnerOutput:
        """A step that has a graph.

        After a replay the host finds little of its code in the CPU's caches: each part of torch and NumPy that a plain
        step touches, inference mode too, costs 20 to 70 us instead of 1 or 2.
        """
        rows, size = inputs.sampling_rows, inputs.dispatch.descriptor.num_tokens
        graph, count = self._graphs[size], len(rows)
        metadata = build_sampling_metadata(self.batch, rows, self.sampling_buffers, size, self.device)
        if metadata.is_plain:
            (tokens,) = graph.step.replay()
            return self._finish(rows, tokens, None)
        with torch.inference_mode():
            (logits,) = graph.forward.replay()
            metadata = dataclasses.replace(metadata, draw=self.sampling_buffers.upload(count))
            return self._finish(rows, *sample(logits[:count], metadata))

    def _prepare(self, output: SchedulerOutput) -> StepInputs:
        batch, num_rows, num_tokens = self.batch, len(self.batch), output.total_num_scheduled_tokens
        scheduled = output.num_scheduled_tokens
        computed = batch.num_computed_tokens[:num_rows]
        starts = self._query_start_loc.np
        positions = self._positions.np[:num_tokens]
        if num_tokens == num_rows == len(scheduled):  # one token for each row
            counts, rows = self._ones[:num_rows], self._numbers[:num_rows]
            starts[: num_rows + 1] = self._numbers[: num_rows + 1]
            positions[:] = computed
        else:
            counts = np.fromiter((scheduled.get(name, 0) for name in batch.request_ids), np.int32, count=num_rows)
            starts[0] = 0
            counts.cumsum(out=starts[1 : num_rows + 1])
            rows = np.arange(num_rows).repeat(counts)
            np.subtract(np.arange(num_tokens), (starts[:num_rows] - computed).repeat(counts), out=positions)
        self._token_ids.np[:num_tokens] = batch.token_ids[rows, positions]
        blocks = batch.block_table[rows, positions // self.block_size]
        self._slot_mapping.np[:num_tokens] = blocks.astype(np.int64) * self.block_size + positions % self.block_size

        seq_lens = self._seq_lens.np[:num_rows]
        np.add(computed, counts, out=seq_lens)
        # Wide enough for the longest sequence here, so that the host copies and the CPU's gather touch no more.
        width = max(-(-max(seq_lens.tolist()) // self.block_size), 1)
        self._block_table.np[:num_rows, :width] = batch.block_table[:num_rows, :width]
        sampling_rows = ((seq_lens == batch.num_tokens[:num_rows]) & (counts > 0)).nonzero()[0]

        computed += counts
        is_decode = num_tokens == num_rows == len(sampling_rows)  # and so one token for each row
        dispatch = self._dispatcher.dispatch(num_tokens, num_rows, uniform=is_decode)
        size = dispatch.descriptor.num_tokens
        if dispatch.mode is RuntimeMode.FULL:
            if size > num_rows:
                self._pad(num_rows, num_tokens, size)
            model_inputs = self.model_inputs(size, size, self.batch.max_blocks)
            logits_indices = None
        else:
            self._slot_mapping.np[num_tokens:size] = -1
            self._logits_indices.np[: len(sampling_rows)] = starts[sampling_rows + 1] - 1
            model_inputs = self.model_inputs(size, num_rows, width)
            logits_indices = self._logits_indices.upload(len(sampling_rows))
        return StepInputs(dispatch, model_inputs, sampling_rows, logits_indices)

    def _pad(self, num_rows: int, num_tokens: int, size: int) -> None:
        """Rows beyond the batch's have no query and write nowhere; they read what an earlier step left."""
        self._slot_mapping.np[num_tokens:size] = -1
        self._seq_lens.np[num_rows:size] = 0
        self._query_start_loc.np[num_rows : size + 1] = num_tokens

    def model_inputs(self, num_tokens: int, num_rows: int, width: int) -> ModelInputs:
        block_table = self._block_table.upload(num_rows)
        attention = AttentionMetadata(
            slot_mapping=self._slot_mapping.upload(num_tokens),
            block_table=block_table if width == self.batch.max_blocks else block_table[:, :width],
            seq_lens=self._seq_lens.upload(num_rows),
            query_start_loc=self._query_start_loc.upload(num_rows + 1),
        )
        return ModelInputs(self._token_ids.upload(num_tokens), self._positions.upload(num_tokens), attention)

    def decode_inputs(self, size: int) -> dict[str, torch.Tensor]:
        """What a decode step of so many rows reads, by name."""
        inputs = self.model_inputs(size, size, self.batch.max_blocks)
        draw = vars(self.sampling_buffers.upload(size))
        return {"token_ids": inputs.token_ids, "positions": inputs.positions, **vars(inputs.attention), **draw}

    def _finish(
        self, rows: np.ndarray, tokens: torch.Tensor, logprobs: list[TokenLogprobs | None] | None
    ) -> RunnerOutput:
        """Appends a token to each of the rows that sampled; waits for the device. Tokens beyond these are padding."""
        row_list = rows.tolist()
        request_ids = [self.batch.request_ids[row] for row in row_list]
        sampled = [[token] for token in tokens.tolist()[: len(row_list)]]
        for row, new_tokens in zip(row_list, sampled, strict=True):
            self.batch.append_tokens(row, new_tokens)
        by_request = {
            name: [entry]
            for name, entry in zip(request_ids, logprobs or [], strict=bool(logprobs))
            if entry is not None
        }
        return RunnerOutput(request_ids, sampled, by_request)


class DecodeState:
    """What a checked replay compares of decode steps: the rows in the batch, and their slots of the KV cache."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner

    def num_rows(self) -> int:
        return len(self._runner.batch)

    def inputs(self) -> dict[str, torch.Tensor]:
        return self._runner.decode_inputs(1)

    def save(self) -> list[torch.Tensor]:
        return [cache[slots].clone() for cache, slots in self._written()]

    def restore(self, saved: list[torch.Tensor]) -> None:
        for (cache, slots), values in zip(self._written(), saved, strict=True):
            cache[slots] = values

    def _written(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        slots = self._runner.decode_inputs(self.num_rows())["slot_mapping"]
        for layer in self._runner.kv_caches:
            for cache in layer:
                yield cache.flatten(0, 1), slots
