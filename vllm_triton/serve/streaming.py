"""Requests in flight: several engine streams as one, server-sent events, and clients that go away."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from vllm_triton.outputs import RequestOutput
from vllm_triton.serve.errors import ClientDisconnectedError, to_api_error

logger = logging.getLogger(__name__)

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]

DONE_EVENT = "data: [DONE]\n\n"


def event(body: BaseModel, exclude: set[str] | None = None) -> str:
    """One server-sent event holding `body` as JSON."""
    return f"data: {body.model_dump_json(exclude=exclude)}\n\n"


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client closes its connection first.

    Raises: ClientDisconnectedError, and whatever `work` raises.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def merge(streams: Sequence[AsyncIterator[RequestOutput]]) -> Outputs:
    """(position in `streams`, output) as they come. Closing it, or one stream's error, closes every stream."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def pump(position: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for output in stream:
                    queue.put_nowait((position, output))
        except Exception as error:  # raised below, where it is awaited
            queue.put_nowait((position, error))
        else:
            queue.put_nowait((position, None))

    pumps = [asyncio.ensure_future(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            position, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield position, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events that end their source as soon as the client is gone, even between two events.

    An error of the source is sent as the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None]):
        super().__init__(self._all(first), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.events = events

    async def _all(self, first: str) -> AsyncGenerator[str, None]:
        yield first
        try:
            async for text in self.events:
                yield text
        except Exception as error:
            logger.warning("a stream ends with an error: %s", error)
            yield f"data: {json.dumps(to_api_error(error).body())}\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events):
            try:
                await until_disconnect(receive, self.stream_response(send))
            except ClientDisconnectedError:
                logger.debug("a client left in the middle of its stream")


async def open_event_stream(request: Request, events: AsyncGenerator[str, None]) -> EventStream:
    """Waits for the first event, so that a refused request still gets a status of its own.

    Raises: what `events` raises before its first event, and ClientDisconnectedError.
    """
    first = await until_disconnect(request.receive, anext(events))
    return EventStream(first, events)
