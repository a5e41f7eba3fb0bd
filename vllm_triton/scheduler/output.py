"""What the scheduler tells the runner each step, and what the runner answers: plain data, no torch."""

from dataclasses import dataclass, field

from vllm_triton.engine.messages import TokenLogprobs
from vllm_triton.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """A request that the runner has no row for: scheduled for the first time, or again after a preemption.

    token_ids: prompt, and after a preemption the output so far.
    stop_token_ids: all ids that end the sequence, EOS among them unless it is ignored; min_tokens forbids them.
    block_ids: blocks of every position up to the end of this step.
    num_computed_tokens: leading tokens that this row does not compute, because their keys and values are in those
        blocks: from an earlier step, or from another row of this one. So in each layer the runner writes the keys and
        values of all rows before any row reads them.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step's batch. The runner applies it in the order of the fields.

    removed_request_ids: finished, aborted or preempted since the last step: their rows are free.
    new_requests: rows to add.
    new_block_ids: request id -> blocks appended to a row that the runner already has.
    num_scheduled_tokens: request id -> tokens to compute, at least 1, in scheduling order. After the step the runner
        counts them as computed, and appends the tokens it sampled.
    """

    removed_request_ids: list[str] = field(default_factory=list)
    new_requests: list[NewRequestData] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0


@dataclass(slots=True)
class RunnerOutput:
    """What the step sampled.

    request_ids: the requests whose last known token was computed in this step, so that they have a next token.
    sampled_token_ids: their new tokens, one list each.
    logprobs: for the requests that asked, one entry per sampled token.
    """

    request_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
