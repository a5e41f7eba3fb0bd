"""A real HTTP server in a thread of the test process, over any engine."""

import threading
from contextlib import contextmanager

import httpx
import openai
import uvicorn

from vllm_triton.serve.app import create_app
from vllm_triton.serve.context import ServerContext
from vllm_triton.serve.launcher import bind
from vllm_triton.serve.metrics import Metrics


class RunningServer:
    """An engine behind a real HTTP server in a thread of the test process."""

    def __init__(self, engine, url):
        self.engine, self.url = engine, url
        self.http = httpx.Client(base_url=url, timeout=20)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=20)


@contextmanager
def run_server(engine, api_key=None):
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            started.set()

    with bind("127.0.0.1", 0) as listener:
        app = create_app(ServerContext(engine, ["scripted", "second-name"]), Metrics("scripted"), api_key)
        server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        assert started.wait(20)
        try:
            yield RunningServer(engine, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()
