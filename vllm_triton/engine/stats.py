"""What the engine tells whoever measures it: times in seconds, counts in tokens."""

from dataclasses import dataclass
from typing import Protocol

from vllm_triton.engine.messages import SchedulerStats


@dataclass(slots=True)
class FinishedRequestStats:
    """One finished request. Latencies in seconds: from arrival to the first token, and to the end.

    mean_time_per_output_token: seconds between output tokens, 0 for fewer than two.
    """

    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    time_to_first_token: float
    e2e_latency: float
    mean_time_per_output_token: float
    max_tokens: int | None
    n: int


class StatsListener(Protocol):
    """Called from the thread that owns the frontend, once for each event."""

    def on_step(self, stats: SchedulerStats) -> None: ...

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None: ...

    def on_tokens(self, num_tokens: int) -> None: ...

    def on_inter_token(self, seconds: float) -> None: ...

    def on_finished(self, stats: FinishedRequestStats) -> None: ...
