"""From flags to a running server and, after Ctrl-C, to a clean end."""

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from vllm_triton.config import EngineConfig
from vllm_triton.errors import ConfigError
from vllm_triton.serve.app import create_app
from vllm_triton.serve.arguments import ServeArguments
from vllm_triton.serve.context import ServerContext
from vllm_triton.serve.metrics import Metrics

if TYPE_CHECKING:
    from vllm_triton.engine.async_engine import AsyncEngine

# After the first signal: until then what runs may finish, until then connections may close, until then the process
# lives, even if the engine is inside a step that takes longer.
DRAIN_SECONDS = 1.5
CLOSE_SECONDS = 2
LAST_SECONDS = 3.0


class Server(uvicorn.Server):
    """A uvicorn server that drains the engine while it closes its connections."""

    def __init__(self, config: uvicorn.Config, engine: "AsyncEngine", ready_message: str):
        super().__init__(config)
        self.engine = engine
        self.ready_message = ready_message

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError:
            await self.engine.shutdown(drain_seconds=0)
            raise
        print(self.ready_message, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self.engine.shutdown(DRAIN_SECONDS))
        await super().shutdown(sockets)
        await draining

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        status = 128 + sig
        if self.should_exit:
            os._exit(status)
        super().handle_exit(sig, frame)
        deadline = threading.Timer(LAST_SECONDS, _give_up, [status])
        deadline.daemon = True
        deadline.start()


def serve(arguments: ServeArguments) -> None:
    """Loads the model and serves it until a signal ends it.

    Raises: OSError if the address cannot be used, ConfigError, ModelError, KeyboardInterrupt when a signal came.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    # Bound before the model loads, so that a port in use is told at once; it refuses calls until the server listens.
    with bind(arguments.host, arguments.port) as listener:
        settings = arguments.engine if "model" in arguments.engine else {"model": _demo_model(), **arguments.engine}
        _serve(EngineConfig(**settings), arguments, listener)


def _demo_model() -> str:
    from vllm_triton.loading import find_demo_model

    return str(find_demo_model())


def _load_engine(config: EngineConfig, metrics: Metrics) -> "AsyncEngine":
    # Imports torch, which takes seconds: after everything that can be refused without it.
    from vllm_triton.engine.async_engine import AsyncEngine
    from vllm_triton.ops.errors import OpError

    try:
        return AsyncEngine.from_config(config, stats_listener=metrics)
    except OpError as error:
        raise ConfigError(str(error)) from error


def _serve(config: EngineConfig, arguments: ServeArguments, listener: socket.socket) -> None:
    model_names = arguments.served_model_names or [_default_model_name(config.model)]
    metrics = Metrics(model_names[0])
    engine = _load_engine(config, metrics)
    app = create_app(ServerContext(engine, model_names), metrics, arguments.api_key)
    uvicorn_config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=CLOSE_SECONDS)
    address = _address(arguments.host, listener.getsockname()[1])
    message = _ready_message(address, model_names[0], arguments.api_key)
    try:
        Server(uvicorn_config, engine, message).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises the signal that ended it once more
        print("Stopped.", flush=True)


def _default_model_name(model: str) -> str:
    """A hub id as it is; of a path its last part, because clients need not know the server's folders."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises: OSError, which says what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is spelled out; with it, every answer waits for the
    # client's delayed acknowledgement, about 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from error
    return listener


def _address(host: str, port: int) -> str:
    """The server's address for somebody on this machine: 0.0.0.0 and :: mean every address, but name none."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _ready_message(address: str, model_name: str, api_key: str | None) -> str:
    body = {"model": model_name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    command = ["curl", "-s", f"{address}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if api_key is not None:
        command += ["-H", f"Authorization: Bearer {api_key}"]
    command += ["-d", json.dumps(body)]
    return (
        f"Serving {model_name} at {address} (Ctrl-C stops it). Chat there in a browser, or try:\n{shlex.join(command)}"
    )


def _give_up(status: int) -> None:
    print("The engine did not stop in time: the process ends without it.", file=sys.stderr, flush=True)
    os._exit(status)


def _interrupt(sig: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
