"""The engine behind a server: the core steps in a thread of its own, text is made on the event loop.

The thread hands over once a step. It takes additions and aborts from a queue, so that the core stays with one thread.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable

from vllm_triton.config import EngineConfig
from vllm_triton.engine.core import EngineCore
from vllm_triton.engine.messages import EngineRequest, EngineStep
from vllm_triton.engine.output_processor import OutputProcessor
from vllm_triton.engine.stats import StatsListener
from vllm_triton.errors import EngineDeadError, RequestError
from vllm_triton.outputs import RequestOutput
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.tokenizer.renderer import RenderedPrompt, Renderer

logger = logging.getLogger(__name__)

_Command = Callable[[], None]


class AsyncEngine:
    """Args: core: loaded and idle; stats_listener: told of every event, on the event loop's thread."""

    def __init__(self, config: EngineConfig, core: EngineCore, stats_listener: StatsListener | None = None):
        self.config = config
        self.model_name = config.model
        self.max_model_len = core.max_model_len
        self.vocab_size = core.model_config.vocab_size
        self.tokenizer = None if config.skip_tokenizer_init else core.checkpoint.load_tokenizer()
        self.renderer = Renderer(self.tokenizer, self.vocab_size, self.max_model_len)
        self._core = core
        self._processor = OutputProcessor(
            self.tokenizer, self.vocab_size, self.max_model_len, core.model_config.eos_token_ids, stats_listener
        )
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._dead: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    def from_config(cls, config: EngineConfig, stats_listener: StatsListener | None = None) -> "AsyncEngine":
        """Loads the model; takes seconds. Raises: ConfigError, ModelError, RegistryError."""
        return cls(config, EngineCore(config), stats_listener)

    async def start(self) -> None:
        """Starts the engine's thread; outputs arrive on the calling event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_unfinished_requests(self) -> int:
        return self._processor.num_unfinished_requests

    def check_health(self) -> None:
        """Raises: EngineDeadError."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead

    async def generate(
        self, prompt: RenderedPrompt, params: SamplingParams, request_id: str, delta: bool = False
    ) -> AsyncIterator[RequestOutput]:
        """Yields one final output, or with delta one for each step that moved the request, holding what is new.

        Closing the iterator ends the request and frees its blocks.
        Raises: RequestError before the first output, EngineDeadError.
        """
        self.check_health()
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        requests = self._processor.add_request(request_id, prompt, params, delta)
        stream: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._streams[request_id] = stream
        self._idle.clear()
        self._commands.put(lambda: self._add(request_id, requests))
        try:
            while True:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._forget(request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator yields what there is, with finish reason "abort". Unknown ids are ignored."""
        running = self._processor.abort_request(request_id)
        self._commands.put(lambda: self._abort(running))

    async def shutdown(self, drain_seconds: float) -> None:
        """Takes no more requests, waits for those that run at most this long, ends the rest, and joins the thread."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_seconds)
        for request_id in list(self._streams):
            self._streams[request_id].put_nowait(EngineDeadError("the server is shutting down"))
        self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        running = self._processor.remove_request(request_id)
        if running:
            self._commands.put(lambda: self._abort(running))
        if not self._streams:
            self._idle.set()

    # On the event loop's thread:

    def _on_step(self, step: EngineStep) -> None:
        if self._dead is not None:
            return
        try:
            outputs, to_abort = self._processor.process(step)
        except Exception as error:  # nobody awaits this call: without an end, readers would miss tokens or wait forever
            logger.exception("the engine stopped: a step's outputs could not be made")
            self._on_death(error)
            self._commands.put(None)
            return
        if to_abort:
            self._commands.put(lambda: self._abort(to_abort))
        for output in outputs:
            self._streams[output.request_id].put_nowait(output)

    def _on_error(self, request_id: str, error: Exception) -> None:
        if request_id in self._streams:
            self._streams[request_id].put_nowait(error)

    def _on_death(self, error: Exception) -> None:
        self._dead = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
        for stream in self._streams.values():
            stream.put_nowait(self._dead)

    # On the engine's thread:

    def _run(self) -> None:
        try:
            while self._take_commands():
                step = self._core.step()
                self._post(self._on_step, step)
        except Exception as error:
            logger.exception("the engine stopped")
            self._post(self._on_death, error)

    def _take_commands(self) -> bool:
        """Runs what is queued, waiting where there is nothing to compute; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._core.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, request_id: str, requests: list[EngineRequest]) -> None:
        try:
            for request in requests:
                self._core.add_request(request)
        except RequestError as error:
            self._abort([request.request_id for request in requests])
            self._post(self._on_error, request_id, error)

    def _abort(self, request_ids: list[str]) -> None:
        # Posted like a step: whoever still reads is told, and the metrics show the freed blocks.
        self._post(self._on_step, EngineStep(self._core.abort_requests(request_ids), self._core.stats()))

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "start() comes before the thread"
        with contextlib.suppress(RuntimeError):  # the loop was closed while this step ran: nobody listens
            self._loop.call_soon_threadsafe(callback, *args)
