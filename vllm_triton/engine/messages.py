"""The engine core's inputs and outputs: plain data, so that the core can live in a process of its own.

No torch, no tokenizer, no callbacks here.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from vllm_triton.sampling_params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate; a request with n > 1 reaches the core as n of these.

    eos_token_ids: ids that end the sequence unless params.ignore_eos.
    max_total_tokens: prompt and output together, at most; the frontend computes it from max_tokens and the context.
    priority: smaller runs first under the priority policy.
    arrival_time: seconds of time.time().
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """Candidates of one position: the sampled token first, then the most likely ones; ranks start at 1."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class EngineOutput:
    """What one step made of one request: `new_token_ids` may be empty when it only ended."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """State after a step, for metrics. kv_cache_usage is a fraction, 0..1; the prefix counts are totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    kernel_compilations: int = 0  # by Triton in the engine's process, since its start


@dataclass(slots=True)
class EngineStep:
    """Everything one step of the core reports."""

    outputs: list[EngineOutput] = field(default_factory=list)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
