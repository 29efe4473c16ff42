"""One choice of an answer: tokens in from the gateway, text out to the client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from cluster.api.context import ApiContext
from cluster.api.detokenizer import Detokenizer
from cluster.api.metrics import RequestTimer
from cluster.api.responses import Finish
from cluster.api.schemas import GenerationBody
from cluster.api.stop import StopMatcher
from cluster.gateway import GatewayError, ServiceFailed, TokenOutput
from scheduler.request import FinishReason, Request

log = structlog.get_logger()


@dataclass(slots=True)
class Choice:
    """One prompt's answer so far."""

    index: int
    request: Request
    detokenizer: Detokenizer
    matcher: StopMatcher
    include_stop: bool
    returns_token_ids: bool
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish: Finish | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> list[int] | None:
        """What the client sees of `tokens`: all of them, or None unless it asked."""
        return self.tokens if self.returns_token_ids else None

    def accept(self, output: TokenOutput) -> str:
        """Take the next token; the text that may now be sent, "" for none. Raises ServiceFailed."""
        if output.index != self.n_tokens:
            raise ServiceFailed(f"The cluster sent token {output.index} where {self.n_tokens} was due.")
        self.tokens.append(output.token)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        text = self._searched(self._decoded(output))
        if self.finish is None and output.finish is not None:
            text += self._finished(output.finish)
        self.texts.append(text)
        return text

    def _decoded(self, output: TokenOutput) -> str:
        is_stop_token = output.finish is FinishReason.STOP and output.token in self.request.stop_token_ids
        if is_stop_token and not self.include_stop:
            return ""
        return self.detokenizer.push(output.token)

    def _searched(self, text: str) -> str:
        """Stop strings count once `min_tokens` tokens exist, as stop tokens do."""
        if self.n_tokens <= self.request.min_tokens:
            return text
        result = self.matcher.push(text)
        if result.is_stopped:
            self.finish = "stop"
        return result.text

    def _finished(self, reason: FinishReason) -> str:
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise ServiceFailed(f"The cluster ended the request early ({reason.value}); send it again.")
        tail = self._searched(self.detokenizer.flush())
        if self.finish is not None:
            return tail
        self.finish = "stop" if reason is FinishReason.STOP else "length"
        return tail + self.matcher.flush()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to a choice; `text` may be empty."""

    choice: Choice
    text: str
    is_first: bool

    @property
    def token_ids(self) -> list[int] | None:
        """The token, if the client asked for it."""
        return self.choice.tokens[-1:] if self.choice.returns_token_ids else None


Emit = Callable[[Delta], Awaitable[None]]


def new_choice(index: int, request: Request, body: GenerationBody, context: ApiContext) -> Choice:
    include_stop = bool(body.include_stop_str_in_output)
    return Choice(
        index=index,
        request=request,
        detokenizer=context.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False),
        matcher=StopMatcher(body.stop_strings, include_stop=include_stop),
        include_stop=include_stop,
        returns_token_ids=bool(body.return_token_ids),
    )


async def run_choices(choices: Sequence[Choice], context: ApiContext, emit: Emit) -> None:
    """Run all choices at once. The first failure cancels the others and is raised."""
    if len(choices) == 1:
        await _run_choice(choices[0], context, emit)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(_run_choice(choice, context, emit))
    except* Exception as failures:
        raise _first(failures) from None


def _first(failures: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


async def _run_choice(choice: Choice, context: ApiContext, emit: Emit) -> None:
    """Emit one delta per token. However it ends, the gateway's iterator is closed: that cancels the request."""
    settings = context.settings
    outputs = context.gateway.generate(choice.request)
    with context.metrics.timed(len(choice.request.prompt), context.clock) as timer:
        try:
            while choice.finish is None:
                output = await _next_output(outputs, settings.next_token_timeout_s)
                text = choice.accept(output)
                _record(timer, choice)
                await emit(Delta(choice, text, is_first=output.index == 0))
        finally:
            await _close(outputs, choice, settings.close_timeout_s)


def _record(timer: RequestTimer, choice: Choice) -> None:
    timer.token()
    if choice.n_tokens == 1:
        timer.cached(choice.cached_tokens or 0)
    if choice.finish is not None:
        timer.finished(choice.finish)


async def _next_output(outputs: AsyncIterator[TokenOutput], timeout_s: float) -> TokenOutput:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(outputs)
    except StopAsyncIteration:
        raise ServiceFailed("The cluster's answer ended before it was complete; send the request again.") from None
    except TimeoutError:
        raise ServiceFailed(f"The cluster sent no token for {timeout_s:g} seconds; try again later.") from None


async def _close(outputs: AsyncIterator[TokenOutput], choice: Choice, timeout_s: float) -> None:
    aclose = getattr(outputs, "aclose", None)
    if aclose is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await aclose()
    except (TimeoutError, GatewayError) as error:
        log.warning("request not cancelled cleanly", request_id=choice.request.request_id, error=repr(error))
