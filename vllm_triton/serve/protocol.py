"""The bodies that clients send. A value that cannot be honoured is refused by name, never dropped.

Every field may be null, which means its default. Ranges of the sampling settings are checked by SamplingParams.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from vllm_triton.errors import RequestError
from vllm_triton.sampling_params import MAX_LOGPROBS, SamplingParams
from vllm_triton.serve.errors import FieldError

Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _check_prompt(value: Any) -> Any:
    is_one = isinstance(value, str) or _is_ids(value)
    is_list = isinstance(value, list) and bool(value)
    if not is_one and not (is_list and all(isinstance(prompt, str) or _is_ids(prompt) for prompt in value)):
        raise ValueError("must be a string, a non-empty list of token ids, or a non-empty list of either")
    return value


def _check_stop(value: Any) -> Any:
    stop = [value] if isinstance(value, str) else value
    if stop is not None and not (isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)):
        raise ValueError("must be a non-empty string or a list of them")
    return stop


def _check_logit_bias(value: Any) -> Any:
    if isinstance(value, dict) and not all(isinstance(key, str) and key.isascii() and key.isdigit() for key in value):
        raise ValueError("must map token ids, written as strings of digits, to numbers")
    return value


def _check_content(value: Any) -> Any:
    parts = [] if isinstance(value, str) else value if isinstance(value, list) else [value]
    for part in parts:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise ValueError('must be a string or a list of {"type": "text", "text": "..."} parts')
    return value


class RequestBody(BaseModel):
    """A JSON object of known fields.

    unsupported: fields that exist in the API but not here, each with the values, besides null, that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def refuse_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            if name in cls.unsupported:
                cls._refuse_unsupported(name, value)
            elif name not in cls.model_fields:
                message = f"unknown field {name!r}; the fields are {', '.join(cls.model_fields)}"
                raise FieldError(message, name, code="unknown_parameter")
        return {name: value for name, value in data.items() if name not in cls.unsupported}

    @classmethod
    def _refuse_unsupported(cls, name: str, value: Any) -> None:
        neutral = cls.unsupported[name]
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            allowed = " or ".join(json.dumps(other) for other in (None, *neutral))
            raise FieldError(f"{name} is not supported: leave it out, or send {allowed}", name, "unsupported_parameter")


class Message(RequestBody):
    """One turn. `name` is accepted and not shown to the model; a developer's message is a system message."""

    unsupported = {
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "refusal": (),
        "annotations": ([],),
        "reasoning_content": ("",),
        "tool_call_id": (),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, str]], BeforeValidator(_check_content)]
    name: str | None = None

    @property
    def num_characters(self) -> int:
        return len(self.content) if isinstance(self.content, str) else sum(len(part["text"]) for part in self.content)

    def as_dict(self) -> dict[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(RequestBody):
    unsupported = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool | None = None


class SamplingRequest(RequestBody):
    """What /v1/completions and /v1/chat/completions have in common.

    max_tokens and min_tokens are in tokens; the other sampling settings are those of SamplingParams. The model's own
    generation_config is not applied: an absent temperature is 1.0.
    """

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_check_stop)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_check_logit_bias)] = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Accepted, because they do not change the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def refuse_options_without_stream(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _build_params(self, **own: Any) -> SamplingParams:
        shared = SamplingRequest.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()
        given = {name: getattr(self, name) for name in shared if getattr(self, name) is not None}
        return SamplingParams(**(given | own))


class CompletionRequest(SamplingRequest):
    """POST /v1/completions. logprobs: candidates per token, 0..20; 0 returns the sampled token alone."""

    unsupported = {"echo": (False,), "suffix": ("",)}

    prompt: Annotated[Prompt | list[Prompt], BeforeValidator(_check_prompt)]
    logprobs: int | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def refuse_best_of(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of must equal n ({self.n or 1}) or be left out, got {self.best_of}", "best_of")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, at least one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    def sampling_params(self) -> SamplingParams:
        """Raises: RequestError, which names the field."""
        return self._build_params(logprobs=self.logprobs)


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions. logprobs: whether to return them; top_logprobs: candidates per token, 0..20."""

    unsupported = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def refuse_top_logprobs_alone(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return self

    def sampling_params(self) -> SamplingParams:
        """Without a limit the answer may fill the context. Raises: RequestError, which names the field."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._build_params(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class TokenizeRequest(RequestBody):
    """POST /tokenize: either a prompt or messages; messages go through the chat template."""

    unsupported = {"continue_final_message": (False,)}

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def require_one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        misplaced = "add_generation_prompt" if self.messages is None else "add_special_tokens"
        if getattr(self, misplaced) is not None:
            raise RequestError(
                f"{misplaced} does not go with {'prompt' if self.messages is None else 'messages'}", misplaced
            )
        return self


class DetokenizeRequest(RequestBody):
    """POST /detokenize: the text of token ids, special tokens included."""

    model: str | None = None
    tokens: list[int]
