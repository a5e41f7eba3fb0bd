"""What a caller gets back, named as vLLM names it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One candidate of one position.

    logprob: natural logarithm of its probability before any mask or penalty.
    rank: 1 for the most likely token.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    logprobs: per generated token, token id -> Logprob, the sampled token first; None unless asked for.
    finish_reason: "stop", "length", "abort", or None while running.
    stop_reason: the stop string or stop token id that ended it; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All choices of a request, in index order.

    A final output holds whole answers. A streamed output (`AsyncEngine.generate(..., delta=True)`) holds only the
    choices that moved, and of them only what is new.
    num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
