"""The persistent batch: one row per running request, kept dense, updated by differences.

Rows are numpy columns, so that a step's inputs are computed for all requests at once. No torch.
"""

import numpy as np

from vllm_triton.sampling_params import SamplingParams
from vllm_triton.scheduler.output import NewRequestData, SchedulerOutput

LARGEST_INT32 = int(np.iinfo(np.int32).max)


class InputBatch:
    """Args: sizes of the largest batch, the longest sequence (tokens), and tokens per KV block.

    Attributes:
        version: another number whenever rows came, went or moved.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int):
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.version = 0
        self.request_ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self.params: list[SamplingParams] = []
        self.stop_token_ids: list[frozenset[int]] = []
        rows = max_num_seqs
        # Zeroed memory is mapped on first touch: short sequences cost little of a long row.
        self.token_ids = np.zeros((rows, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((rows, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.num_tokens = np.zeros(rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(rows, dtype=np.int32)
        self.num_computed_tokens = np.zeros(rows, dtype=np.int32)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.repetition_penalty = np.zeros(rows, dtype=np.float32)
        self.presence_penalty = np.zeros(rows, dtype=np.float32)
        self.frequency_penalty = np.zeros(rows, dtype=np.float32)
        self.is_penalised = np.zeros(rows, dtype=np.bool_)
        self.seed = np.zeros(rows, dtype=np.int64)
        self._lists: list[list] = [self.request_ids, self.params, self.stop_token_ids]
        self._columns = [column for column in vars(self).values() if isinstance(column, np.ndarray)]

    def __len__(self) -> int:
        return len(self.request_ids)

    def apply(self, output: SchedulerOutput) -> None:
        """Removes, adds and extends rows as the scheduler says."""
        for request_id in output.removed_request_ids:
            if request_id in self.row_of:  # one that ended before its first step has no row
                self._remove(request_id)
        for request in output.new_requests:
            self._add(request)
        for request_id, block_ids in output.new_block_ids.items():
            self._append_blocks(self.row_of[request_id], block_ids)

    def clear(self) -> None:
        """Removes all rows."""
        self.version += 1
        for items in self._lists:
            items.clear()
        self.row_of.clear()

    def append_tokens(self, row: int, token_ids: list[int]) -> None:
        start = self.num_tokens[row]
        if len(token_ids) == 1:
            self.token_ids[row, start] = token_ids[0]  # a slice would be filled from an array made of the list
        else:
            self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] = start + len(token_ids)

    def _add(self, request: NewRequestData) -> None:
        row, params, count = len(self.request_ids), request.params, len(request.token_ids)
        self.version += 1
        self.request_ids.append(request.request_id)
        self.params.append(params)
        self.stop_token_ids.append(request.stop_token_ids)
        self.row_of[request.request_id] = row
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_blocks[row] = 0
        self.block_table[row] = 0
        self._append_blocks(row, request.block_ids)
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = min(params.top_k, LARGEST_INT32)  # beyond the vocabulary all mean the same
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.is_penalised[row] = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        assert params.seed is not None, "the engine core gives every request a seed"
        self.seed[row] = params.seed

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def _remove(self, request_id: str) -> None:
        """Frees a row and moves the last one into the hole."""
        row, last = self.row_of.pop(request_id), len(self.request_ids) - 1
        self.version += 1
        if row != last:
            for column in self._columns:
                column[row] = column[last]
            for items in self._lists:
                items[row] = items[last]
            self.row_of[self.request_ids[row]] = row
        for items in self._lists:
            items.pop()
