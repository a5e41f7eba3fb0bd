"""Renderer: every way of asking becomes one list of token ids, checked against the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_triton.errors import RequestError
from vllm_triton.tokenizer.tokenizer import Tokenizer

_PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What the model reads. text is None for a prompt that was given as token ids."""

    text: str | None
    token_ids: list[int]


class Renderer:
    """Renders prompts and conversations for one model; used by the server and by offline callers alike.

    Args:
        tokenizer: None for a model that is only given token ids.
        vocab_size: number of token ids that the model has.
        max_model_len: tokens of prompt and answer together, at most.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def render_prompt(self, prompt: str | Mapping[str, Any] | list[int]) -> RenderedPrompt:
        """A text (special tokens such as BOS are added), token ids, or a dict that holds one of the two.

        Raises: RequestError(param="prompt").
        """
        if isinstance(prompt, Mapping):
            prompt = _only_value(prompt)
        if isinstance(prompt, str):
            token_ids = self._tokenizer("prompt").encode(prompt)
            return self._checked(RenderedPrompt(prompt, token_ids), "prompt")
        if not isinstance(prompt, list):
            raise RequestError(
                f"prompt must be a string, a list of token ids, or a dict with one of {', '.join(_PROMPT_KEYS)}, "
                f"got {type(prompt).__name__}",
                "prompt",
            )
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(f"prompt token ids must be integers, got {token_id!r}", "prompt")
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prompt token ids must be from 0 to {self.vocab_size - 1}, got {token_id}", "prompt"
                )
        return self._checked(RenderedPrompt(None, list(prompt)), "prompt")

    def render_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> RenderedPrompt:
        """A conversation, written by the model's chat template.

        The template writes the special tokens itself, so none are added: there is one BOS.
        Args:
            messages: dicts with a `role` and a `content`: a string, or a list of text parts, which are joined.
            variables: further names for the template.
        Raises: RequestError(param="messages").
        """
        tokenizer = self._tokenizer("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError(f"messages must be a list of at least one message, got {messages!r}", "messages")
        text = tokenizer.apply_chat_template(
            [_plain_message(number, message) for number, message in enumerate(messages)],
            add_generation_prompt,
            **variables,
        )
        try:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
        except RequestError as error:
            raise RequestError(str(error), "messages") from error
        return self._checked(RenderedPrompt(text, token_ids), "messages")

    def _tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer: send the prompt as token ids", param)
        return self.tokenizer

    def _checked(self, rendered: RenderedPrompt, param: str) -> RenderedPrompt:
        num_tokens = len(rendered.token_ids)
        if num_tokens == 0:
            raise RequestError(f"{param} is empty: it must have at least one token", param)
        if (largest := max(rendered.token_ids)) >= self.vocab_size:
            raise RequestError(
                f"{param} has the token id {largest}, but the model has only {self.vocab_size} ids: "
                "the tokenizer does not fit the model",
                param,
            )
        if num_tokens > self.max_model_len - 1:
            raise RequestError(
                f"{param} has {num_tokens} tokens, but at most {self.max_model_len - 1} fit into the context of "
                f"{self.max_model_len} with one left for the answer: shorten it, or start the engine with a larger "
                "max_model_len",
                param,
            )
        return rendered


def _only_value(prompt: Mapping[str, Any]) -> Any:
    unknown = sorted(str(key) for key in prompt if key not in _PROMPT_KEYS)
    if unknown or len(prompt) != 1:
        problem = f"unknown key {unknown[0]!r}" if unknown else f"{len(prompt)} keys"
        raise RequestError(
            f"a prompt dict must have one of the keys {', '.join(_PROMPT_KEYS)}, got {problem}", "prompt"
        )
    [(key, value)] = prompt.items()
    wanted, description = (str, "a string") if key == "prompt" else (list, "a list of token ids")
    if not isinstance(value, wanted):
        raise RequestError(f"{key} must be {description}, got {type(value).__name__}", "prompt")
    return value


def _plain_message(number: int, message: Any) -> dict[str, Any]:
    """The message with its content as one string; messages of tool calls may have none."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{number}] must be a dict, got {type(message).__name__}", "messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(f"messages[{number}].role must be a string, got {role!r}", "messages")
    if isinstance(content, list):
        content = "".join([_text_of_part(number, part) for part in content])
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(
            f"messages[{number}].content must be a string or a list of text parts, got {content!r}", "messages"
        )
    return {**message, "content": content}


def _text_of_part(number: int, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(
            f"messages[{number}].content has a part of type {kind!r}; only "
            '{"type": "text", "text": "..."} is supported',
            "messages",
        )
    return part["text"]
