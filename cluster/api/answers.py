"""Choices in, an HTTP answer out: whole or streamed."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from cluster.api.connection import run_while_connected
from cluster.api.context import ApiContext
from cluster.api.generation import Choice, Delta, run_choices
from cluster.api.responses import PromptTokensDetails, Usage
from cluster.api.schemas import GenerationBody
from cluster.api.streaming import EventSink, EventStream


class AnswerShape(Protocol):
    """How one route words its answers."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> BaseModel: ...

    def chunk(self, delta: Delta, usage: Usage | None) -> BaseModel: ...

    def usage_chunk(self, usage: Usage) -> BaseModel: ...


async def answer(
    http: Request, body: GenerationBody, choices: Sequence[Choice], shape: AnswerShape, context: ApiContext
) -> Response:
    """Raises GatewayError and ClientLeft; a stream's do so from the response."""
    if body.stream:
        return EventStream(partial(_stream, body, choices, shape, context), context.settings)
    work = run_choices(choices, context, _drop)
    await run_while_connected(http.receive, work, context.settings.close_timeout_s)
    return Response(shape.whole(choices, usage_of(choices)).model_dump_json(), media_type="application/json")


async def _drop(_: Delta) -> None:
    """The choices keep their text."""


async def _stream(
    body: GenerationBody, choices: Sequence[Choice], shape: AnswerShape, context: ApiContext, sink: EventSink
) -> None:
    async def emit(delta: Delta) -> None:
        usage = usage_of(choices) if body.has_continuous_usage else None
        await sink.event(shape.chunk(delta, usage))

    await run_choices(choices, context, emit)
    if body.includes_usage:
        await sink.event(shape.usage_chunk(usage_of(choices)))


def usage_of(choices: Sequence[Choice]) -> Usage:
    n_prompt = sum(len(choice.request.prompt) for choice in choices)
    n_output = sum(choice.n_tokens for choice in choices)
    cached = [choice.cached_tokens for choice in choices if choice.cached_tokens is not None]
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_output,
        total_tokens=n_prompt + n_output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(cached)) if cached else None,
    )
