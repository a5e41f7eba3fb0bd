"""An engine without a model: every character is a token, and the test decides what is answered and when it stalls."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from vllm_triton.errors import EngineDeadError, RequestError
from vllm_triton.outputs import CompletionOutput, Logprob, RequestOutput

VOCAB_SIZE = 0x250
MAX_MODEL_LEN = 20_000


@dataclass
class ScriptedPrompt:
    text: str | None
    token_ids: list[int]


class ScriptedTokenizer:
    vocab_size = VOCAB_SIZE

    def encode(self, text, add_special_tokens=True):
        if any(0xD800 <= ord(character) < 0xE000 for character in text):
            raise RequestError("text is not valid Unicode", "prompt")
        return [1] * add_special_tokens + [min(ord(character), VOCAB_SIZE - 1) for character in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))

    def decode_token(self, token):
        return chr(token)


class ScriptedRenderer:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def render_prompt(self, prompt):
        if isinstance(prompt, str):
            return ScriptedPrompt(prompt, self.tokenizer.encode(prompt))
        if max(prompt) >= VOCAB_SIZE:
            raise RequestError(f"prompt must hold token ids below {VOCAB_SIZE}, got {max(prompt)}", "prompt")
        return ScriptedPrompt(None, prompt)

    def render_chat(self, messages, add_generation_prompt=True):
        text = ""
        for message in messages:
            content = message["content"]
            plain = content if isinstance(content, str) else "".join(part["text"] for part in content)
            text += f"<{message['role']}>{plain}"
        text += "<assistant>" * add_generation_prompt
        return ScriptedPrompt(text, self.tokenizer.encode(text))


@dataclass
class ScriptedEngine:
    """Choice i of a request answers `answer` without its last i characters.

    stall_after: characters after which a request waits for ever, if its prompt holds "stall".
    fail_after: characters after which a request fails with `failure`, if its prompt holds "fail".
    """

    answer: str = "Hello, world"
    stall_after: int = 3
    fail_after: int = 3
    failure: Exception = field(default_factory=lambda: EngineDeadError("a step failed"))
    is_dead: bool = False
    model_name: str = "scripted"
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    tokenizer: ScriptedTokenizer = field(default_factory=ScriptedTokenizer)

    def __post_init__(self):
        self.renderer = ScriptedRenderer(self.tokenizer)
        self.running: set[str] = set()
        self.stalled: set[str] = set()
        self.changed = threading.Condition()

    @property
    def num_unfinished_requests(self):
        return len(self.running)

    def wait_for(self, predicate, timeout=10):
        """Blocks the test until `predicate()`, which looks at running and stalled."""
        with self.changed:
            assert self.changed.wait_for(predicate, timeout), (self.running, self.stalled)

    async def start(self):
        pass

    async def shutdown(self, drain_seconds):
        pass

    def check_health(self):
        if self.is_dead:
            raise EngineDeadError("a step failed")

    async def generate(self, prompt, params, request_id, delta=False) -> AsyncGenerator[RequestOutput, None]:
        self.check_health()
        params.verify_vocabulary(self.vocab_size)
        if len(prompt.token_ids) >= self.max_model_len:
            raise RequestError(f"the prompt has {len(prompt.token_ids)} tokens, too many", "prompt")
        text = prompt.text or ""
        if "refuse" in text:
            raise RequestError("this prompt is refused", "prompt")
        with self.changed:
            self.running.add(request_id)
        try:
            async for output in self._answer(prompt, params, request_id, delta):
                yield output
        finally:
            with self.changed:
                self.running.discard(request_id)
                self.stalled.discard(request_id)
                self.changed.notify_all()

    async def _answer(self, prompt, params, request_id, delta):
        text = prompt.text or ""
        limit = params.max_tokens or MAX_MODEL_LEN
        answers = [self.answer[: len(self.answer) - index] for index in range(params.n)]
        reasons = ["length" if limit < len(answer) else "stop" for answer in answers]
        answers = [answer[:limit] for answer in answers]
        for position in range(max(map(len, answers))):
            await asyncio.sleep(0)
            if "stall" in text and position == self.stall_after:
                with self.changed:
                    self.stalled.add(request_id)
                    self.changed.notify_all()
                await asyncio.get_running_loop().create_future()
            if "fail" in text and position == self.fail_after:
                raise self.failure
            if delta:
                moved = [
                    self._choice(index, answer[position], params, reason if position + 1 == len(answer) else None)
                    for index, (answer, reason) in enumerate(zip(answers, reasons, strict=True))
                    if position < len(answer)
                ]
                yield self._output(prompt, request_id, moved)
        if not delta:
            triples = enumerate(zip(answers, reasons, strict=True))
            yield self._output(prompt, request_id, [self._choice(i, a, params, r) for i, (a, r) in triples])

    def _output(self, prompt, request_id, choices):
        return RequestOutput(request_id, prompt.text, prompt.token_ids, choices, num_cached_tokens=2)

    def _choice(self, index, text, params, reason):
        logprobs = None
        if params.logprobs is not None:
            logprobs = [self._candidates(character, params.logprobs) for character in text]
        return CompletionOutput(index, text, list(map(ord, text)), logprobs, reason)

    def _candidates(self, character, count):
        """The sampled character is the second most likely; "?" was masked and "!" is the most likely."""
        ranked = {ord("!"): Logprob(-0.5, 1, "!"), ord(character): Logprob(-1.0, 2, character)}
        ranked |= {ord("?"): Logprob(float("-inf"), 3, "?")}
        sampled = {ord(character): ranked[ord(character)]}
        return sampled | dict(list(ranked.items())[:count])
