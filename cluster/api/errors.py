"""Errors as OpenAI clients expect them: a status and {"error": {message, type, param, code}}."""

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from cluster.gateway import GatewayError, Overloaded, RequestRejected

log = structlog.get_logger()

INTERNAL_MESSAGE = "The server failed while it handled this request. The cause is in the server's log."


class ApiError(Exception):
    """A refusal or failure with its HTTP status. `param` names the field that the client should change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": _error_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def gateway_api_error(error: GatewayError, retry_after_s: int) -> ApiError:
    if isinstance(error, RequestRejected):
        return bad_request(str(error))
    if isinstance(error, Overloaded):
        headers = {"Retry-After": str(retry_after_s)}
        return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
    return ApiError(500, str(error), code="service_failed")


def internal_error() -> ApiError:
    return ApiError(500, INTERNAL_MESSAGE, code="internal_error")


def install_error_handlers(app: FastAPI, retry_after_s: int) -> None:
    """Give every failure of `app` the OpenAI shape, unknown routes and our own faults included."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_gateway_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError)
        return gateway_api_error(error, retry_after_s).response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _route_error(request, error).response()

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return bad_request("; ".join(str(detail["msg"]) for detail in error.errors())).response()

    async def on_fault(request: Request, error: Exception) -> Response:
        log.error("request failed", path=request.url.path, exc_info=error)
        return internal_error().response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(GatewayError, on_gateway_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_fault)


def _route_error(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 404:
        return ApiError(404, f"There is no {method} {path} here; docs/api.md lists the routes.")
    if error.status_code == 405:
        allowed = (headers or {}).get("allow") or (headers or {}).get("Allow") or "another method"
        return ApiError(405, f"{path} does not take {method}; use {allowed}.", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)
