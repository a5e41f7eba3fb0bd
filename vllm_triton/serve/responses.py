"""The bodies that the server sends, in OpenAI's shapes; `stop_reason` and `max_model_len` are additions.

Times are whole seconds since the epoch, log-probabilities are natural logarithms.
"""

import time
from typing import Literal

from pydantic import BaseModel, Field

from vllm_triton.outputs import CompletionOutput, Logprob, RequestOutput

# JSON has no infinity; a token that cannot be drawn is given this log-probability instead.
LOWEST_LOGPROB = -9999.0


def _now() -> int:
    return int(time.time())


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    """Counts in tokens. cached_tokens: prompt tokens found in the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)

    def add_prompt(self, output: RequestOutput) -> None:
        """Counts the prompt of one request: call it once for each."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.total_tokens += len(output.prompt_token_ids)
        self.prompt_tokens_details.cached_tokens += output.num_cached_tokens

    def add_completion(self, choice: CompletionOutput) -> None:
        self.completion_tokens += len(choice.token_ids)
        self.total_tokens += len(choice.token_ids)


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def from_candidate(cls, candidate: Logprob) -> "TopLogprob":
        return cls(**_describe(candidate))


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]

    @classmethod
    def from_positions(cls, positions: list[dict[int, Logprob]], num_top: int) -> "ChatLogprobs":
        """positions: per token, its candidates, the sampled one first; num_top: most likely ones to list."""
        content = []
        for candidates in positions:
            sampled = next(iter(candidates.values()))
            ranked = sorted(candidates.values(), key=lambda candidate: candidate.rank)
            top = [TopLogprob.from_candidate(candidate) for candidate in ranked[:num_top]]
            content.append(TokenLogprob(**_describe(sampled), top_logprobs=top))
        return cls(content=content)


class CompletionLogprobs(BaseModel):
    """text_offset: where each token starts, in characters of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    text_offset: list[int] = []

    @classmethod
    def from_positions(cls, positions: list[dict[int, Logprob]], start: int = 0) -> "CompletionLogprobs":
        """start: offset of the first token. Candidates with equal text are listed once, as the first of them."""
        result = cls()
        offset = start
        for candidates in positions:
            sampled = next(iter(candidates.values()))
            top: dict[str, float] = {}
            for candidate in candidates.values():
                top.setdefault(candidate.decoded_token or "", _finite(candidate))
            result.tokens.append(sampled.decoded_token or "")
            result.token_logprobs.append(_finite(sampled))
            result.top_logprobs.append(top)
            result.text_offset.append(offset)
            offset += len(sampled.decoded_token or "")
        return result


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    """delta: {"role", "content"} in a choice's first chunk, {"content"} in the others."""

    index: int
    delta: dict[str, str]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion(BaseModel):
    """A whole answer, or one chunk of a stream: both have this shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=_now)
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """max_model_len: prompt and answer together, in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vllm_triton"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


def _finite(candidate: Logprob) -> float:
    return max(candidate.logprob, LOWEST_LOGPROB)


def _describe(candidate: Logprob) -> dict:
    token = candidate.decoded_token or ""
    return {"token": token, "logprob": _finite(candidate), "bytes": list(token.encode("utf-8", "replace"))}
