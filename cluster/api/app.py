"""The HTTP application."""

import secrets
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from cluster.api.chat import chat_router
from cluster.api.completions import completions_router
from cluster.api.connection import ClientLeft
from cluster.api.context import ApiContext
from cluster.api.errors import install_error_handlers
from cluster.api.lora import lora_router
from cluster.api.metrics import ApiMetrics, CountRequests
from cluster.api.require_key import RequireKey
from cluster.api.service import service_router
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ChatTokenizer
from cluster.api.tokens import tokens_router
from cluster.api_keys import ApiKeys
from cluster.gateway import Gateway
from scheduler.ids import RequestId


def _random_seed() -> int:
    return secrets.randbits(63)


def create_app(
    gateway: Gateway,
    tokenizer: ChatTokenizer,
    model_name: str,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    settings: ApiSettings,
    new_request_id: Callable[[], RequestId],
    clock: Callable[[], float],
    *,
    new_seed: Callable[[], int] = _random_seed,
    unix_time: Callable[[], float] = time.time,
    keys: ApiKeys | None = None,
) -> FastAPI:
    """The API over `gateway`.

    clock: seconds from any start, never going back, for durations. unix_time: seconds since the epoch.
    new_seed: the seed (0 <= seed < 2**63) of a request that names none. keys: one of them is wanted of each request,
    see `RequireKey`; None or no keys wants none.
    """
    metrics = ApiMetrics()
    context = ApiContext(
        gateway=gateway,
        tokenizer=tokenizer,
        model_name=model_name,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        settings=settings,
        metrics=metrics,
        new_request_id=new_request_id,
        new_seed=new_seed,
        clock=clock,
        unix_time=unix_time,
    )
    # Bodies are read by the routes, within their limits, so a generated schema would not show them.
    app = FastAPI(title="Prelay", openapi_url=None)
    for make_router in (chat_router, completions_router, tokens_router, lora_router, service_router):
        app.include_router(make_router(context))
    install_error_handlers(app, settings.retry_after_s)
    app.add_exception_handler(ClientLeft, _on_client_left)
    if keys:
        app.add_middleware(RequireKey, keys=keys)
    app.add_middleware(CountRequests, metrics=metrics)
    return app


async def _on_client_left(_: Request, error: Exception) -> Response:
    """Nobody reads this answer; its status is for the metrics."""
    return Response(status_code=499)
