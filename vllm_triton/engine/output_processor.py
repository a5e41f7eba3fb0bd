"""The frontend's half of a request: from engine outputs to text, choices and statistics.

A request with n choices is n sequences in the core; here they meet again.
"""

import dataclasses
import itertools
import time
from dataclasses import dataclass, field

from vllm_triton.engine.messages import EngineOutput, EngineRequest, EngineStep, FinishReason, TokenLogprobs
from vllm_triton.engine.stats import FinishedRequestStats, StatsListener
from vllm_triton.errors import RequestError
from vllm_triton.outputs import CompletionOutput, Logprob, RequestOutput
from vllm_triton.sampling_params import SEED_LIMIT, SamplingParams
from vllm_triton.tokenizer.detokenizer import IncrementalDetokenizer
from vllm_triton.tokenizer.renderer import RenderedPrompt
from vllm_triton.tokenizer.tokenizer import Tokenizer


@dataclass(eq=False)
class _Parent:
    """One request as the user made it."""

    request_id: str
    prompt: RenderedPrompt
    params: SamplingParams
    delta: bool
    arrival: float  # seconds of time.monotonic()
    choices: list["_Choice"] = field(default_factory=list)
    num_cached_tokens: int = 0
    first_token: float | None = None
    aborted: bool = False

    @property
    def finished(self) -> bool:
        return all(choice.output.finished for choice in self.choices)


@dataclass(eq=False)
class _Choice:
    """One sequence; `output` holds all of it, `num_reported_tokens` counts those a delta has shown."""

    engine_id: str
    parent: _Parent
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    num_reported_tokens: int = 0
    last_token: float | None = None


class OutputProcessor:
    """Args: tokenizer: None where only ids are wanted; limits of the model, in tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        stats_listener: StatsListener | None = None,
    ):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # The tokenizer may know an end of turn that the model's configuration leaves out.
        own = tokenizer.eos_token_id if tokenizer is not None else None
        self.eos_token_ids = eos_token_ids if own is None or own >= vocab_size else eos_token_ids | {own}
        self.stats_listener = stats_listener
        self._parents: dict[str, _Parent] = {}
        self._choices: dict[str, _Choice] = {}
        self._numbers = itertools.count()

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._parents)

    def add_request(
        self, request_id: str, prompt: RenderedPrompt, params: SamplingParams, delta: bool = False, priority: int = 0
    ) -> list[EngineRequest]:
        """Registers a request and returns the sequences to give to the core.

        Raises: RequestError for what does not fit the model, and for an id that is in use.
        """
        if request_id in self._parents:
            raise RequestError(f"request id {request_id!r} is in use: choose another one", "request_id")
        params = dataclasses.replace(params)  # checks it again: its owner may have changed it
        if params.bad_words:
            params = dataclasses.replace(params, bad_words=[], bad_words_token_ids=self._bad_words_token_ids(params))
        params.verify_vocabulary(self.vocab_size)
        if self.tokenizer is None and params.detokenize:
            if params.stop:
                raise RequestError(
                    "stop needs a tokenizer, which skip_tokenizer_init left out: use stop_token_ids", "stop"
                )
            params = dataclasses.replace(params, detokenize=False)
        room = self.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt.token_ids)} tokens, which leaves no room for an answer within "
                f"{self.max_model_len}: shorten it",
                "prompt",
            )
        parent = _Parent(request_id, prompt, params, delta, time.monotonic())
        self._parents[request_id] = parent
        return [self._add_choice(parent, index, room, priority) for index in range(params.n)]

    def _bad_words_token_ids(self, params: SamplingParams) -> list[list[int]]:
        """Those of the parameters, and each bad word's as it begins a text and as it follows a space."""
        if self.tokenizer is None:
            raise RequestError(
                "bad_words needs a tokenizer, which skip_tokenizer_init left out: use bad_words_token_ids", "bad_words"
            )
        found = list(params.bad_words_token_ids)
        for word in params.bad_words:
            for text in (word, f" {word.lstrip(' ')}"):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _add_choice(self, parent: _Parent, index: int, room: int, priority: int) -> EngineRequest:
        params = parent.params
        # Numbered, so that a step under way for an ended request says nothing of a new one with the same id.
        engine_id = f"{parent.request_id}#{next(self._numbers)}"
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = IncrementalDetokenizer(self.tokenizer, parent.prompt.token_ids, params)
        output = CompletionOutput(index, "", [], None if params.logprobs is None else [])
        choice = _Choice(engine_id, parent, output, detokenizer)
        parent.choices.append(choice)
        self._choices[engine_id] = choice
        seed = None if params.seed is None else (params.seed + index) % SEED_LIMIT
        return EngineRequest(
            request_id=engine_id,
            prompt_token_ids=parent.prompt.token_ids,
            params=dataclasses.replace(params, n=1, seed=seed),
            eos_token_ids=self.eos_token_ids,
            max_total_tokens=len(parent.prompt.token_ids) + min(params.max_tokens or room, room),
            arrival_time=time.time(),
            priority=priority,
        )

    def running_sequences(self, request_id: str) -> list[str]:
        """The sequences of a request that the core still has; none for an unknown one."""
        parent = self._parents.get(request_id)
        return [choice.engine_id for choice in parent.choices if not choice.output.finished] if parent else []

    def abort_request(self, request_id: str) -> list[str]:
        """Lets what still runs of a request end as an abort, however a step under way ends it.

        Returns: the sequences to abort in the core.
        """
        running = self.running_sequences(request_id)
        if running:
            self._parents[request_id].aborted = True
        return running

    def remove_request(self, request_id: str) -> list[str]:
        """Forgets a request whose caller went away; returns the sequences to abort in the core."""
        running = self.running_sequences(request_id)
        parent = self._parents.pop(request_id, None)
        for engine_id in running:
            self._choices.pop(engine_id).output.finish_reason = str(FinishReason.ABORT)
        if parent is not None:
            self._record_finished(parent, time.monotonic())
        return running

    def process(self, step: EngineStep) -> tuple[list[RequestOutput], list[str]]:
        """Turns a step into outputs: one for each request that moved (delta) or ended.

        Returns: the outputs, and the sequences that a stop string ended, to abort in the core.
        """
        now = time.monotonic()
        moved: dict[str, list[_Choice]] = {}
        to_abort: list[str] = []
        for engine_output in step.outputs:
            choice = self._choices.get(engine_output.request_id)
            if choice is None:  # its caller went away during the step
                continue
            if self._update(choice, engine_output, now):
                to_abort.append(choice.engine_id)
            if choice.output.finished:
                if choice.parent.aborted:
                    choice.output.finish_reason, choice.output.stop_reason = str(FinishReason.ABORT), None
                del self._choices[choice.engine_id]
            moved.setdefault(choice.parent.request_id, []).append(choice)
        if self.stats_listener is not None:
            self.stats_listener.on_step(step.stats)
        outputs = [
            output for name, choices in moved.items() if (output := self._report(self._parents[name], choices, now))
        ]
        return outputs, to_abort

    def _update(self, choice: _Choice, engine_output: EngineOutput, now: float) -> bool:
        """Appends a step's tokens to a choice; True where a stop string ended it before the core knew."""
        output, parent = choice.output, choice.parent
        parent.num_cached_tokens = max(parent.num_cached_tokens, engine_output.num_cached_tokens)
        new_ids = engine_output.new_token_ids
        output.token_ids.extend(new_ids)
        if output.logprobs is not None and engine_output.logprobs:
            output.logprobs.extend(self._named(entry) for entry in engine_output.logprobs)
        self._record_tokens(choice, len(new_ids), now)
        output.finish_reason = engine_output.finish_reason and str(engine_output.finish_reason)
        output.stop_reason = engine_output.stop_reason
        if choice.detokenizer is None:
            return False
        ended_by_token = engine_output.finish_reason is FinishReason.STOP
        stop_string = choice.detokenizer.update(new_ids, ended_by_token)
        if stop_string is None or ended_by_token:
            return False
        core_goes_on = engine_output.finish_reason is None
        output.finish_reason, output.stop_reason = str(FinishReason.STOP), stop_string
        return core_goes_on

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        names = [None if self.tokenizer is None else self.tokenizer.decode_token(token) for token in entry.token_ids]
        named: dict[int, Logprob] = {}
        for token, logprob, rank, name in zip(entry.token_ids, entry.logprobs, entry.ranks, names, strict=True):
            named.setdefault(token, Logprob(logprob, rank, name))
        return named

    def _report(self, parent: _Parent, moved: list[_Choice], now: float) -> RequestOutput | None:
        finished = parent.finished
        if finished:
            del self._parents[parent.request_id]
            self._record_finished(parent, now)
        if parent.delta:
            outputs = [_delta(choice) for choice in sorted(moved, key=lambda choice: choice.output.index)]
        elif finished:
            outputs = [_whole(choice) for choice in parent.choices]
        else:
            return None
        prompt = parent.prompt
        return RequestOutput(
            parent.request_id, prompt.text, prompt.token_ids, outputs, finished, parent.num_cached_tokens
        )

    def _record_tokens(self, choice: _Choice, count: int, now: float) -> None:
        if self.stats_listener is None or not count:
            return
        self.stats_listener.on_tokens(count)
        if choice.parent.first_token is None:
            choice.parent.first_token = now
            self.stats_listener.on_first_token(now - choice.parent.arrival, len(choice.parent.prompt.token_ids))
        if choice.last_token is not None:
            self.stats_listener.on_inter_token(now - choice.last_token)
        choice.last_token = now

    def _record_finished(self, parent: _Parent, now: float) -> None:
        if self.stats_listener is None:
            return
        first = parent.first_token if parent.first_token is not None else now
        longest = max(len(choice.output.token_ids) for choice in parent.choices)
        self.stats_listener.on_finished(
            FinishedRequestStats(
                finish_reason=_finish_reason(parent),
                num_prompt_tokens=len(parent.prompt.token_ids),
                num_cached_tokens=parent.num_cached_tokens,
                num_generation_tokens=sum(len(choice.output.token_ids) for choice in parent.choices),
                time_to_first_token=first - parent.arrival,
                e2e_latency=now - parent.arrival,
                mean_time_per_output_token=(now - first) / (longest - 1) if longest > 1 else 0.0,
                max_tokens=parent.params.max_tokens,
                n=parent.params.n,
            )
        )


def _finish_reason(parent: _Parent) -> str:
    """That of the last choice, or "abort" where any was cut off."""
    reasons = [choice.output.finish_reason for choice in parent.choices]
    return str(FinishReason.ABORT) if str(FinishReason.ABORT) in reasons else reasons[-1] or ""


def _whole(choice: _Choice) -> CompletionOutput:
    """A finished choice with its text."""
    if choice.detokenizer is not None:
        choice.detokenizer.next_delta(finished=True)
        choice.output.text = choice.detokenizer.text
    return choice.output


def _delta(choice: _Choice) -> CompletionOutput:
    """What is new of a choice since its last delta."""
    output, start = choice.output, choice.num_reported_tokens
    choice.num_reported_tokens = len(output.token_ids)
    return CompletionOutput(
        output.index,
        choice.detokenizer.next_delta(output.finished) if choice.detokenizer is not None else "",
        output.token_ids[start:],
        None if output.logprobs is None else output.logprobs[start:],
        output.finish_reason,
        output.stop_reason,
    )
