"""POST /v1/completions: one or several prompts, n choices each, whole or streamed."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import Response

from vllm_triton.outputs import CompletionOutput
from vllm_triton.serve.context import ServerContext, collect, new_request_id
from vllm_triton.serve.protocol import CompletionRequest
from vllm_triton.serve.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from vllm_triton.serve.streaming import DONE_EVENT, Outputs, event, open_event_stream, until_disconnect


async def create_completion(context: ServerContext, body: CompletionRequest, request: Request) -> Completion | Response:
    """Choice index = prompt's position * n + choice of that prompt.

    Raises: RequestError, ApiError, EngineDeadError, ClientDisconnectedError.
    """
    context.check_model(body.model)
    params = body.sampling_params()
    prompts = await context.render_prompts(body.prompts, params.n)
    request_id = new_request_id("cmpl")
    outputs = context.generate(prompts, params, request_id, delta=bool(body.stream))
    if body.stream:
        return await open_event_stream(request, _events(context, outputs, request_id, params.n, body.include_usage))

    results = await until_disconnect(request.receive, collect(outputs))
    usage = Usage()
    choices = []
    for position, result in enumerate(results):
        usage.add_prompt(result)
        for output in result.outputs:
            usage.add_completion(output)
            choices.append(_choice(position * params.n + output.index, output, start=0))
    return Completion(id=request_id, model=context.model_name, choices=choices, usage=usage)


def _choice(index: int, output: CompletionOutput, start: int) -> CompletionChoice:
    logprobs = None if output.logprobs is None else CompletionLogprobs.from_positions(output.logprobs, start)
    return CompletionChoice(
        index=index,
        text=output.text,
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


async def _events(
    context: ServerContext, outputs: Outputs, request_id: str, num_choices: int, include_usage: bool
) -> AsyncGenerator[str, None]:
    created = int(time.time())
    usage = Usage()
    seen_prompts: set[int] = set()
    text_lengths: dict[int, int] = {}  # choice index -> characters of its tokens so far
    hidden = None if include_usage else {"usage"}

    def chunk(choices: list[CompletionChoice], usage: Usage | None = None) -> str:
        body = Completion(id=request_id, created=created, model=context.model_name, choices=choices, usage=usage)
        return event(body, exclude=hidden)

    async with aclosing(outputs):
        async for position, result in outputs:
            if position not in seen_prompts:
                seen_prompts.add(position)
                usage.add_prompt(result)
            for output in result.outputs:
                usage.add_completion(output)
                index = position * num_choices + output.index
                choice = _choice(index, output, start=text_lengths.get(index, 0))
                if choice.logprobs:
                    text_lengths[index] = text_lengths.get(index, 0) + sum(map(len, choice.logprobs.tokens))
                if output.text or output.logprobs or output.finish_reason:
                    yield chunk([choice])
    if include_usage:
        yield chunk([], usage)
    yield DONE_EVENT
