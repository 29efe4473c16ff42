"""Routes about the service itself: models, health, version, cluster status, metrics."""

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cluster.api.cluster_metrics import render_status
from cluster.api.context import ApiContext
from cluster.api.errors import ApiError

log = structlog.get_logger()


def service_router(context: ApiContext) -> APIRouter:
    router = APIRouter()
    started = int(context.unix_time())

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(context, started)]}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        context.check_model(model)
        return _model_card(context, started)

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

    @router.get("/metrics")
    @router.get("/prometheus/metrics")
    async def metrics() -> Response:
        return Response(await _metrics_text(context), media_type=CONTENT_TYPE_LATEST)

    return router


def _model_card(context: ApiContext, created: int) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": created,
        "owned_by": "prelay",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.max_model_len,
    }


def _version() -> str:
    try:
        return version("prelay")
    except PackageNotFoundError:
        return "unknown"


async def _status(context: ApiContext) -> dict[str, Any]:
    """Raises ApiError 503 when the cluster fails or does not answer in time."""
    timeout_s = context.settings.status_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await context.gateway.status()
    except Exception as error:
        log.warning("no status from the cluster", error=repr(error))
        raise ApiError(
            503, "The cluster gave no status; see the server's log and try again later.", code="no_status"
        ) from error


async def _metrics_text(context: ApiContext) -> bytes:
    """The API's own metrics always; the cluster's when it answers."""
    try:
        status = await _status(context)
    except ApiError:
        status = None
    return context.metrics.render() + render_status(status, context.metrics.names)
