"""POST /v1/chat/completions: messages through the model's template, n choices, whole or streamed."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import Response

from vllm_triton.errors import RequestError
from vllm_triton.outputs import CompletionOutput
from vllm_triton.serve.context import ServerContext, collect, new_request_id
from vllm_triton.serve.protocol import ChatCompletionRequest
from vllm_triton.serve.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from vllm_triton.serve.streaming import DONE_EVENT, Outputs, event, open_event_stream, until_disconnect


async def create_chat_completion(
    context: ServerContext, body: ChatCompletionRequest, request: Request
) -> ChatCompletion | Response:
    """Raises: RequestError, ApiError, EngineDeadError, ClientDisconnectedError."""
    context.check_model(body.model)
    request_id = new_request_id("chatcmpl")
    try:
        params = body.sampling_params()
        prompt = await context.render_chat(body.messages)
        outputs = context.generate([prompt], params, request_id, delta=bool(body.stream))
        if body.stream:
            return await open_event_stream(request, _events(context, body, outputs, request_id))
        [result] = await until_disconnect(request.receive, collect(outputs))
    except RequestError as error:
        raise RequestError(str(error), _field_of(body, error.param)) from error

    usage = Usage()
    usage.add_prompt(result)
    choices = []
    for output in result.outputs:
        usage.add_completion(output)
        choice = ChatChoice(
            index=output.index,
            message=ChatMessage(content=output.text),
            logprobs=_logprobs(body, output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        choices.append(choice)
    return ChatCompletion(id=request_id, model=context.model_name, choices=choices, usage=usage)


def _field_of(body: ChatCompletionRequest, param: str | None) -> str | None:
    """The chat's name of a field that the engine knows under another one."""
    if param == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return {"prompt": "messages", "logprobs": "top_logprobs"}.get(param or "", param)


def _logprobs(body: ChatCompletionRequest, output: CompletionOutput) -> ChatLogprobs | None:
    if output.logprobs is None:
        return None
    return ChatLogprobs.from_positions(output.logprobs, body.top_logprobs or 0)


async def _events(
    context: ServerContext, body: ChatCompletionRequest, outputs: Outputs, request_id: str
) -> AsyncGenerator[str, None]:
    created = int(time.time())
    usage = Usage()
    started: set[int] = set()  # choices whose role was sent
    hidden = None if body.include_usage else {"usage"}

    def chunk(choices: list[ChatChunkChoice], usage: Usage | None = None) -> str:
        message = ChatCompletionChunk(
            id=request_id, created=created, model=context.model_name, choices=choices, usage=usage
        )
        return event(message, exclude=hidden)

    is_first = True
    async with aclosing(outputs):
        async for _, result in outputs:
            if is_first:
                usage.add_prompt(result)
                is_first = False
            for output in result.outputs:
                usage.add_completion(output)
                if output.index not in started:
                    started.add(output.index)
                    delta = {"role": "assistant", "content": ""}
                    yield chunk([ChatChunkChoice(index=output.index, delta=delta)])
                if output.text or output.logprobs or output.finish_reason:
                    choice = ChatChunkChoice(
                        index=output.index,
                        delta={"content": output.text},
                        logprobs=_logprobs(body, output),
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                    )
                    yield chunk([choice])
    if body.include_usage:
        yield chunk([], usage)
    yield DONE_EVENT
