"""What every route shares: the engine, the names the model is served under, and the way from a body to outputs."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from vllm_triton.outputs import RequestOutput
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.serve.errors import ApiError, shorten
from vllm_triton.serve.protocol import Message, Prompt
from vllm_triton.serve.streaming import Outputs, merge

if TYPE_CHECKING:
    from vllm_triton.engine.async_engine import AsyncEngine
    from vllm_triton.tokenizer.renderer import RenderedPrompt
    from vllm_triton.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

# Longer texts, in characters, are tokenised in a thread: at a few megabytes a second they would delay other streams.
LONG_TEXT = 10_000
# What a message or a prompt costs beside its text, in characters.
ITEM_COST = 20
# Sequences that one request may start: each holds memory from its arrival on.
MOST_SEQUENCES = 2048


@dataclass
class ServerContext:
    """model_names: what clients may call the model; the first is the name in answers."""

    engine: "AsyncEngine"
    model_names: list[str]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def tokenizer(self) -> "Tokenizer":
        assert self.engine.tokenizer is not None, "no flag of the server leaves the tokenizer out"
        return self.engine.tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises: ApiError 404 unless `name` is served; None stands for the model there is."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            message = f"the model {shorten(name)} is not served here; served: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def render_prompts(self, prompts: list[Prompt], num_choices: int) -> list["RenderedPrompt"]:
        """Raises: RequestError, ApiError where they would start too many sequences."""
        if len(prompts) * num_choices > MOST_SEQUENCES:
            message = (
                f"prompts times n must be at most {MOST_SEQUENCES}, got {len(prompts)} prompts with n={num_choices}"
            )
            raise ApiError(400, message, param="prompt", code="invalid_value")
        num_characters = sum(ITEM_COST + len(prompt) for prompt in prompts)
        render = self.engine.renderer.render_prompt
        return await _in_thread_if_long(num_characters, lambda: [render(prompt) for prompt in prompts])

    async def render_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> "RenderedPrompt":
        """Raises: RequestError."""
        turns = [message.as_dict() for message in messages]
        num_characters = sum(ITEM_COST + message.num_characters for message in messages)
        render = self.engine.renderer.render_chat
        return await _in_thread_if_long(num_characters, lambda: render(turns, add_generation_prompt))

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await _in_thread_if_long(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    def generate(
        self, prompts: list["RenderedPrompt"], params: SamplingParams, request_id: str, delta: bool = False
    ) -> Outputs:
        """(position in `prompts`, output) as they come; when one prompt fails, the others are aborted."""
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
        pairs = zip(prompts, ids, strict=True)
        return merge([self.engine.generate(prompt, params, one_id, delta) for prompt, one_id in pairs])


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


async def collect(outputs: Outputs) -> list[RequestOutput]:
    """The final outputs, in the order of the prompts."""
    finals = {position: output async for position, output in outputs}
    return [finals[position] for position in sorted(finals)]


async def _in_thread_if_long(num_characters: int, tokenise: Callable[[], T]) -> T:
    return await asyncio.to_thread(tokenise) if num_characters > LONG_TEXT else tokenise()
