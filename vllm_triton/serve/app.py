"""The routes, and who may call them."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import vllm_triton
from vllm_triton.errors import RequestError
from vllm_triton.serve.chat import create_chat_completion
from vllm_triton.serve.completions import create_completion
from vllm_triton.serve.context import ServerContext
from vllm_triton.serve.errors import ApiError, install_error_handlers
from vllm_triton.serve.metrics import Metrics
from vllm_triton.serve.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from vllm_triton.serve.responses import (
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    Text,
    Tokens,
    Version,
)


class ApiKeyMiddleware:
    """Refuses calls of the model's routes that do not carry the key. Plain ASGI: it must pass disconnects through."""

    def __init__(self, app: ASGIApp, api_key: str):
        self.app = app
        self.expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_protected(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                message = "missing or wrong API key: send the header Authorization: Bearer <key>"
                await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    @staticmethod
    def _is_protected(path: str) -> bool:
        return path.startswith("/v1/") or path in ("/tokenize", "/detokenize")


def create_app(context: ServerContext, metrics: Metrics, api_key: str | None = None) -> FastAPI:
    """The application. It starts the context's engine when it starts, and stops it when it ends."""
    engine = context.engine
    chat_page = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await engine.start()
        yield
        await engine.shutdown(drain_seconds=0)

    # No pages under /docs: they load their scripts from elsewhere. The schema itself is at /openapi.json.
    app = FastAPI(
        title="vllm_triton",
        version=vllm_triton.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_chat_page() -> HTMLResponse:
        return HTMLResponse(chat_page)

    @app.get("/health")
    async def check_health() -> Response:
        engine.check_health()
        return Response()

    @app.get("/version")
    async def show_version() -> Version:
        return Version(version=vllm_triton.__version__)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    def card(name: str) -> ModelCard:
        root, max_model_len = context.model_name, engine.max_model_len
        return ModelCard(id=name, created=context.created, root=root, max_model_len=max_model_len)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card(name) for name in context.model_names])

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> ModelCard:
        context.check_model(name)
        return card(name)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> ChatCompletion | Response:
        return await create_chat_completion(context, body, request)

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Completion | Response:
        return await create_completion(context, body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        context.check_model(body.model)
        if body.messages is not None:
            token_ids = (await context.render_chat(body.messages, body.add_generation_prompt is not False)).token_ids
        else:
            token_ids = await context.encode(body.prompt or "", body.add_special_tokens is not False)
        strings = [context.tokenizer.decode_token(token) for token in token_ids] if body.return_token_strs else None
        return Tokens(count=len(token_ids), max_model_len=engine.max_model_len, tokens=token_ids, token_strs=strings)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Text:
        context.check_model(body.model)
        for token in body.tokens:
            if not 0 <= token < engine.vocab_size:
                raise RequestError(f"tokens must hold ids from 0 to {engine.vocab_size - 1}, got {token}", "tokens")
        return Text(prompt=context.tokenizer.decode(body.tokens, skip_special_tokens=False))

    return app
