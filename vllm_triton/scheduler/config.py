"""Settings of the scheduler."""

from dataclasses import dataclass

from vllm_triton.errors import ConfigError
from vllm_triton.scheduler.queue import WAITING_QUEUES


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and the order of requests.

    Args:
        max_num_seqs: requests that run at once, >= 1; the runner has as many rows.
        max_num_batched_tokens: tokens computed in one step at most, >= max_num_seqs, so that every running request
            can have one.
        max_model_len: prompt and output of one request together, in tokens, >= 2.
        long_prefill_token_threshold: tokens of one request in one step at most, so that a long prompt leaves room for
            others; 0 for no such limit.
        policy: "fcfs" runs requests in order of arrival, "priority" those with the smallest priority first.
        enable_prefix_caching: whether requests share the blocks of equal prefixes.
    Raises: ConfigError, which names the setting.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"request can have a token in each step, got {self.max_num_batched_tokens}: raise it, or lower "
                "max_num_seqs"
            )
        if self.policy not in WAITING_QUEUES:
            raise ConfigError(f"policy must be one of {', '.join(WAITING_QUEUES)}, got {self.policy!r}")


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
