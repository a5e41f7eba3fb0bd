"""SamplingParams: how one request wants its tokens drawn and when it ends."""

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_triton.errors import RequestError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
SEED_LIMIT = 2**63
# The sampler computes in float32; a larger strength would become infinite there, and the weights NaN.
LARGEST_STRENGTH = 3e38
LARGEST_COUNT = 2**31 - 1


@dataclass
class SamplingParams:
    """Settings of one request, named as vLLM names them.

    Args:
        n: choices returned for the prompt, 1..128.
        presence_penalty: subtracted once from the logit of each token already generated, -2..2.
        frequency_penalty: subtracted per occurrence in the output, -2..2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, > 0.
        temperature: divides the logits, >= 0; below 1e-5 the most likely token is taken.
        top_p: smallest set of most likely tokens whose mass reaches it, 0 < top_p <= 1.
        top_k: number of most likely tokens kept; 0 or -1 keeps all.
        min_p: drops tokens less likely than min_p times the most likely one, 0..1.
        seed: makes the request's draws reproducible, whatever else is in the batch; 0 <= seed < 2**63.
        stop: strings that end the answer; they are cut off unless include_stop_str_in_output.
        stop_token_ids: token ids that end the answer.
        ignore_eos: goes on after the model's end-of-sequence token.
        max_tokens: tokens generated at most, >= 1; None means up to the context's end.
        min_tokens: tokens before which neither EOS nor a stop token can be drawn.
        logprobs: log-probabilities of the k most likely tokens and of the sampled one, 0..20; None for none.
        logit_bias: added to the logits of these token ids, -100..100 each.
        allowed_token_ids: the only token ids that may be drawn; None for all.
        bad_words: texts that may not appear: the last token of one is forbidden where those before it stand.
        bad_words_token_ids: the same as token ids; those of bad_words are added where the request meets a tokenizer.
        detokenize: False returns ids alone, without text.
        skip_special_tokens: leaves special tokens out of the text.
        include_stop_str_in_output: keeps the stop string (or the stop token's text) in the text.
    Raises: RequestError, which names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if not isinstance(self.stop_token_ids, list | tuple | set | frozenset | type(None)):
            raise RequestError(
                f"stop_token_ids must be a list of integers, got {self.stop_token_ids!r}", "stop_token_ids"
            )
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.logit_bias = _int_keys(self.logit_bias or {})
        self.bad_words = [self.bad_words] if isinstance(self.bad_words, str) else list(self.bad_words or [])
        if self.top_k == -1:
            self.top_k = 0
        self._verify()

    def _verify(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 1 / LARGEST_STRENGTH, LARGEST_STRENGTH)
        _number("temperature", self.temperature, 0, LARGEST_STRENGTH)
        _number("top_p", self.top_p, 0, 1, low_open=True)
        _integer("top_k", self.top_k, 0, None, also="(or -1) to keep all tokens")
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, LARGEST_COUNT)
        most = LARGEST_COUNT if self.max_tokens is None else self.max_tokens
        _integer("min_tokens", self.min_tokens, 0, most, also="and at most max_tokens")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must hold non-empty strings, got {self.stop!r}", "stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True: stop strings are found in the text", "stop")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list | tuple) or not self.allowed_token_ids:
                raise RequestError(
                    f"allowed_token_ids must be a non-empty list of integers, got {self.allowed_token_ids!r}",
                    "allowed_token_ids",
                )
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0, None)
        if not all(isinstance(word, str) and word for word in self.bad_words):
            raise RequestError(f"bad_words must hold non-empty strings, got {self.bad_words!r}", "bad_words")
        for ids in self.bad_words_token_ids:
            if not isinstance(ids, list | tuple) or not ids:
                raise RequestError(
                    f"bad_words_token_ids must hold non-empty lists of integers, got {ids!r}", "bad_words_token_ids"
                )
            for token in ids:
                _integer("bad_words_token_ids", token, 0, None)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100, 100)

    def verify_vocabulary(self, vocab_size: int) -> None:
        """Refuses token ids that the model does not have."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": itertools.chain.from_iterable(self.bad_words_token_ids),
        }
        for name, ids in named.items():
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(f"{name} must hold token ids below {vocab_size}, got {token}", name)


def _int_keys(mapping: dict[Any, Any]) -> dict[int, float]:
    try:
        # JSON has text alone as keys; a fraction is no token id.
        return {
            int(token) if isinstance(token, str) else operator.index(token): bias for token, bias in mapping.items()
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"logit_bias must map token ids to numbers, got {mapping!r}", "logit_bias") from error


def _number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    wrong_type = isinstance(value, bool) or not isinstance(value, int | float)
    if wrong_type or not low <= value <= high or (low_open and value == low):  # NaN is in no range
        range_text = f"{'above' if low_open else 'at least'} {low} and at most {high}"
        raise RequestError(f"{name} must be a finite number {range_text}, got {value!r}", name)


def _integer(name: str, value: Any, low: int, high: int | None, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        range_text = f"at least {low}" + (f" and at most {high}" if high is not None else "")
        raise RequestError(f"{name} must be an integer {range_text} {also}".rstrip() + f", got {value!r}", name)
