"""A runner without a model, which holds the scheduler to its contract and remembers what it wrote where.

The "model" is a function of the token prefix. Each slot of each block remembers which prefix was written to it, so
that a block that is read before it is written, after it was reused, or by the wrong request is caught.
"""

from dataclasses import dataclass

from vllm_triton.engine.messages import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from vllm_triton.kv_cache import KVCacheManager
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.scheduler.config import SchedulerConfig
from vllm_triton.scheduler.output import RunnerOutput, SchedulerOutput
from vllm_triton.scheduler.scheduler import Scheduler

VOCAB_SIZE = 7
EOS = 0


def prefix_hashes(token_ids: list[int], before: int = 1) -> list[int]:
    """One number per position, which stands for all tokens up to it."""
    hashes = []
    for token_id in token_ids:
        before = hash((before, token_id))
        hashes.append(before)
    return hashes


def next_token(prefix_hash: int) -> int:
    return prefix_hash % 1000003 % VOCAB_SIZE


def make_engine_request(request_id: str, prompt: list[int], max_total_tokens: int = 0, **settings) -> EngineRequest:
    """`settings` that EngineRequest knows go to it, the others to SamplingParams."""
    own = {name: settings.pop(name) for name in ("priority", "arrival_time", "cache_salt") if name in settings}
    params = SamplingParams(max_tokens=None, **settings)
    return EngineRequest(request_id, prompt, params, frozenset({EOS}), max_total_tokens, **own)


def make_scheduler(num_blocks: int = 1000, block_size: int = 16, **settings) -> Scheduler:
    config = SchedulerConfig(**settings)
    return Scheduler(config, KVCacheManager(num_blocks, block_size, config.enable_prefix_caching))


def reference_output(source: EngineRequest, max_num_tokens: int) -> tuple[list[int], FinishReason, int | None]:
    """What a request generates when it is alone: token ids, why it ends, and the stop reason."""
    tokens = list(source.prompt_token_ids)
    params = source.params
    while True:
        token = next_token(prefix_hashes(tokens)[-1])
        tokens.append(token)
        output = tokens[len(source.prompt_token_ids) :]
        if len(output) >= params.min_tokens:
            if token in source.eos_token_ids and not params.ignore_eos:
                return output, FinishReason.STOP, None
            if token in params.stop_token_ids:
                return output, FinishReason.STOP, token
        if len(tokens) == max_num_tokens:
            return output, FinishReason.LENGTH, None


@dataclass
class Row:
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    wants_logprobs: bool
    hashes: list[int]


class SimulatedRunner:
    """Keeps rows as a real runner does. Every broken promise of the scheduler is an AssertionError."""

    def __init__(self, scheduler: Scheduler):
        self.config = scheduler.config
        self.num_blocks = scheduler.kv_cache_manager.pool.num_blocks
        self.block_size = scheduler.kv_cache_manager.block_size
        self.rows: dict[str, Row] = {}
        self.slots: dict[tuple[int, int], int] = {}

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        self._update_rows(step)
        self._check_batch(step)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self.rows[request_id]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
                self.slots[self._slot(row, position)] = row.hashes[position]
        output = RunnerOutput()
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self.rows[request_id]
            row.num_computed_tokens += num_tokens
            self._check_reads(request_id, row)
            if row.num_computed_tokens == len(row.token_ids):
                self._sample(request_id, row, output)
        return output

    def _update_rows(self, step: SchedulerOutput) -> None:
        for request_id in step.removed_request_ids:
            del self.rows[request_id]
        for new in step.new_requests:
            assert new.request_id not in self.rows, f"{new.request_id} has a row already"
            assert 0 < new.num_prompt_tokens <= len(new.token_ids)
            assert new.num_computed_tokens < len(new.token_ids), "a row without a token to compute"
            wants_logprobs = new.params.logprobs is not None
            self.rows[new.request_id] = Row(
                new.token_ids,  # the runner's own from here on: it appends to them
                new.block_ids,
                new.num_computed_tokens,
                wants_logprobs,
                prefix_hashes(new.token_ids),
            )
        new_ids = {new.request_id for new in step.new_requests}
        assert len(new_ids) == len(step.new_requests)
        for request_id, block_ids in step.new_block_ids.items():
            assert request_id not in new_ids, "new rows bring their blocks themselves"
            assert block_ids, "an entry without blocks"
            self.rows[request_id].block_ids += block_ids

    def _check_batch(self, step: SchedulerOutput) -> None:
        scheduled = step.num_scheduled_tokens
        assert len(self.rows) <= self.config.max_num_seqs
        assert all(num_tokens >= 1 for num_tokens in scheduled.values())
        assert step.total_num_scheduled_tokens == sum(scheduled.values()) <= self.config.max_num_batched_tokens
        assert set(step.new_block_ids) <= set(scheduled)
        assert {new.request_id for new in step.new_requests} <= set(scheduled)
        threshold = self.config.long_prefill_token_threshold
        assert not threshold or max(scheduled.values(), default=0) <= threshold
        written: set[int] = set()
        for request_id, num_tokens in scheduled.items():
            row = self.rows[request_id]
            end = row.num_computed_tokens + num_tokens
            assert end <= len(row.token_ids)
            assert len(row.block_ids) == -(-end // self.block_size), "blocks of every position up to the step's end"
            assert len(set(row.block_ids)) == len(row.block_ids)
            assert all(0 < block_id < self.num_blocks for block_id in row.block_ids)
            writes = set(row.block_ids[row.num_computed_tokens // self.block_size :])
            assert not writes & written, "two rows write one block"
            written |= writes

    def _check_reads(self, request_id: str, row: Row) -> None:
        for position in range(row.num_computed_tokens):
            assert self.slots.get(self._slot(row, position)) == row.hashes[position], (
                f"{request_id} reads other tokens than its own at position {position}"
            )

    def _sample(self, request_id: str, row: Row, output: RunnerOutput) -> None:
        token = next_token(row.hashes[-1])
        row.token_ids.append(token)
        row.hashes += prefix_hashes([token], row.hashes[-1])
        output.request_ids.append(request_id)
        output.sampled_token_ids.append([token])
        if row.wants_logprobs:
            output.logprobs[request_id] = [TokenLogprobs([token], [-0.5], [1])]

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.block_size], position % self.block_size


def run_step(scheduler: Scheduler, runner: SimulatedRunner) -> list[EngineOutput]:
    """One whole step; it must compute something if there is any request."""
    step = scheduler.schedule()
    assert step.num_scheduled_tokens or not scheduler.has_unfinished_requests(), "an empty batch while requests wait"
    return scheduler.update_from_output(step, runner.execute(step))


def run_to_end(scheduler: Scheduler, runner: SimulatedRunner, max_steps: int = 5000) -> dict[str, list[EngineOutput]]:
    """Steps until no request is left. Returns: the outputs of each request, in order."""
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(max_steps):
        if not scheduler.has_unfinished_requests():
            return outputs
        for output in run_step(scheduler, runner):
            outputs.setdefault(output.request_id, []).append(output)
        scheduler.check_integrity()
    raise AssertionError(f"requests did not end within {max_steps} steps: {list(scheduler.requests.values())}")


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]
