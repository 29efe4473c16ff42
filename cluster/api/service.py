"""Routes about the service itself: models, health, version, cluster status, stories of requests, metrics."""

import asyncio
from collections.abc import Awaitable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cluster.api.cluster_metrics import render_status
from cluster.api.context import ApiContext
from cluster.api.errors import ApiError
from scheduler.ids import RequestId

log = structlog.get_logger()

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
"""What an answer's id has before the request's."""


def service_router(context: ApiContext) -> APIRouter:
    router = APIRouter()
    started = int(context.unix_time())

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": _model_cards(context, started)}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        context.check_model(model)
        return next(card for card in _model_cards(context, started) if card["id"] == model)

    @router.get("/health")
    async def health() -> dict[str, str]:
        missing = (await _status(context)).get("missing_roles") or []
        if missing:
            raise ApiError(503, f"No {' and no '.join(missing)} node is alive; restart the server.")
        return {"status": "ok"}

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": _version()}

    @router.get("/cluster/status")
    async def cluster_status() -> dict[str, Any]:
        return await _status(context)

    @router.get("/cluster/story/{request_id:path}")
    async def story(request_id: str) -> dict[str, Any]:
        return await _story(request_id, context)

    @router.get("/metrics")
    @router.get("/prometheus/metrics")
    async def metrics() -> Response:
        return Response(await _metrics_text(context), media_type=CONTENT_TYPE_LATEST)

    return router


def _model_cards(context: ApiContext, started: int) -> list[dict[str, Any]]:
    """The base model, then its adapters."""
    base = context.model_name
    return [
        _model_card(base, base, None, started, context),
        *(_model_card(a.name, a.path, base, a.created, context) for a in context.lora.served.values()),
    ]


def _model_card(name: str, root: str, parent: str | None, created: int, context: ApiContext) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "prelay",
        "root": root,
        "parent": parent,
        "max_model_len": context.max_model_len,
    }


def _version() -> str:
    try:
        return version("prelay")
    except PackageNotFoundError:
        return "unknown"


async def _status(context: ApiContext) -> dict[str, Any]:
    """Raises ApiError 503 when the cluster fails or does not answer in time."""
    return await _in_time(context.gateway.status(), "status", context)


async def _story(answer_id: str, context: ApiContext) -> dict[str, Any]:
    """answer_id: a request's id, or the id of its answer. Raises ApiError 404 or 503."""
    request_id = answer_id
    for prefix in ANSWER_PREFIXES:
        request_id = request_id.removeprefix(prefix)
    document = await _in_time(context.gateway.story(RequestId(request_id)), "story", context)
    if not document["lines"]:
        silent = [f"{node['node']} does not answer ({node['reason']})" for node in document["silent"]]
        raise ApiError(
            404,
            f"No node knows the request {request_id!r}; a node forgets what ended long ago."
            + "".join(f" {sentence}." for sentence in silent),
            code="request_not_found",
        )
    return document


async def _in_time(answer: Awaitable[dict[str, Any]], what: str, context: ApiContext) -> dict[str, Any]:
    try:
        async with asyncio.timeout(context.settings.status_timeout_s):
            return await answer
    except Exception as error:
        log.warning(f"no {what} from the cluster", error=repr(error))
        raise ApiError(
            503, f"The cluster gave no {what}; see the server's log and try again later.", code=f"no_{what}"
        ) from error


async def _metrics_text(context: ApiContext) -> bytes:
    """The API's own metrics always; the cluster's when it answers."""
    try:
        status = await _status(context)
    except ApiError:
        status = None
    return context.metrics.render() + render_status(status, context.metrics.names)
