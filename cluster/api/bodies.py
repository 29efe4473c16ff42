"""Reading a request body within its limits, and turning it into a checked model."""

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from cluster.api.connection import ClientLeft
from cluster.api.errors import ApiError, bad_request
from cluster.api.schemas import Body
from cluster.api.settings import ApiSettings

B = TypeVar("B", bound=Body)

_SHOWN_CHARS = 60


async def read_body(http: Request, model: type[B], settings: ApiSettings) -> B:
    """The request's JSON body as `model`. Raises ApiError 400, 408, 413 or 415, and ClientLeft."""
    _check_content_type(http)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            raw = await _read_limited(http, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"The request body did not arrive within {settings.body_timeout_s:g} seconds; send it again."
        ) from None
    except ClientDisconnect:
        raise ClientLeft from None
    return parse_body(raw, model)


def parse_body(raw: bytes, model: type[B]) -> B:
    """Raises ApiError 400 that names the first wrong field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _as_bad_request(error.errors(include_url=False)[0], model) from None


def _check_content_type(http: Request) -> None:
    content_type = http.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415,
            f"The request's content type is {content_type or 'missing'!r}; send JSON with "
            "'Content-Type: application/json'.",
        )


async def _read_limited(http: Request, limit: int) -> bytes:
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The request body is over the limit of {limit} bytes; send a shorter one.", code="body_too_large"
    )


def _as_bad_request(error: ErrorDetails, model: type[Body]) -> ApiError:
    if error["type"] == "json_invalid":
        return bad_request(f"The body is not valid JSON: {error['ctx']['error']}.", code="invalid_json")
    if not error["loc"]:
        return bad_request("The body must be a JSON object.", code="invalid_json")
    field = str(error["loc"][0])
    if error["type"] == "missing" and len(error["loc"]) == 1:
        return bad_request(f"The field {field!r} is missing; add it.", field, "missing_field")
    return bad_request(_complaint(error, field, model), field, "invalid_value")


def _complaint(error: ErrorDetails, field: str, model: type[Body]) -> str:
    """Where a field takes several types, its description says it better than any one branch's error."""
    info = model.model_fields.get(field)
    if info is not None and info.description:
        return f"{field} must be {info.description}."
    path = ".".join(str(part) for part in error["loc"])
    return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, not {_shown(error['input'])}."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
