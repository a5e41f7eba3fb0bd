"""Errors as clients see them: {"error": {"message", "type", "param", "code"}}, whatever went wrong."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_triton.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

# nginx's status for a client that went away before its answer; nobody reads it.
CLIENT_CLOSED_REQUEST = 499


class ClientDisconnectedError(Exception):
    """The client closed its connection before its answer was complete."""


class ApiError(Exception):
    """An error with a status and the four fields of OpenAI's shape. param names the field of the request, if one."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        # A refused value is quoted, and JSON text may hold half of a surrogate pair, which no response can.
        safe = {key: text and text.encode("utf-8", "replace").decode() for key, text in error.items()}
        return {"error": safe}

    def response(self) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


class FieldError(RequestError):
    """A RequestError with a code of its own for clients that look at it."""

    def __init__(self, message: str, param: str, code: str):
        super().__init__(message, param)
        self.code = code


def to_api_error(error: Exception) -> ApiError:
    """What a client is told about `error`; one that nobody expected is logged and not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return _from_request_error(error, error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), type="server_error", code="engine_dead")
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        return _from_http(error)
    logger.error("a request failed with an unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", type="server_error", code="internal_error")


class UnexpectedErrorMiddleware:
    """Answers what no handler expected with status 500. The framework would do so too, but then drop the connection."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception as error:
            if has_started or scope["type"] != "http":
                raise
            await to_api_error(error).response()(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    async def respond(request: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    async def respond_to_nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (ApiError, RequestError, EngineDeadError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, respond)
    app.add_exception_handler(ClientDisconnectedError, respond_to_nobody)
    app.add_middleware(UnexpectedErrorMiddleware)


def _from_request_error(error: RequestError, param: str | None) -> ApiError:
    code = error.code if isinstance(error, FieldError) else "invalid_value"
    return ApiError(400, str(error), param=param, code=code)


def _from_http(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "no such address; the server's addresses are listed in /openapi.json", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, "this address does not take this method", code="method_not_allowed")
    if error.status_code == 400:
        # The framework raises it for a body that is not valid JSON text.
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    return ApiError(error.status_code, str(error.detail))


def _from_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    location = [part for part in first["loc"] if part != "body"]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return _from_request_error(cause, str(location[0]) if location else cause.param)
    if not location:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, message, code="invalid_type")
    param = str(location[0])
    path = param + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    if first["type"] == "missing":
        return ApiError(400, f"{path} is required", param=param, code="missing_required_parameter")
    reason = str(cause) if cause else first["msg"][0].lower() + first["msg"][1:]
    return ApiError(400, f"{path}: {reason}, got {shorten(first['input'])}", param=param, code="invalid_value")


def shorten(value: Any, limit: int = 80) -> str:
    """repr(value), without building all of a long one."""
    text = repr(value[:limit] if isinstance(value, str | list) else value)
    return text if len(text) <= limit else text[:limit] + "..."
