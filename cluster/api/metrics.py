"""What the API itself measures, for Prometheus."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.connection import ClientLeft

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

NO_ANSWER = "499"
"""The status counted when the client left before any status was sent."""


class ApiMetrics:
    """Counters, gauges and histograms in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.http_requests = Counter(
            "prelay_http_requests", "HTTP requests by route and status", ["route", "status"], registry=registry
        )
        self.finished = Counter(
            "prelay_finished",
            "Ended choices by how they ended: stop, length, cancelled, error",
            ["reason"],
            registry=registry,
        )
        self.running = Gauge("prelay_running", "Choices that are being served", registry=registry)
        self.prompt_tokens = Counter("prelay_prompt_tokens", "Prompt tokens of served choices", registry=registry)
        self.cached_tokens = Counter("prelay_cached_tokens", "Prompt tokens found in a prefix cache", registry=registry)
        self.generation_tokens = Counter("prelay_generation_tokens", "Sampled tokens", registry=registry)
        self.time_to_first_token = self._histogram("prelay_time_to_first_token_seconds", _SECONDS)
        self.inter_token = self._histogram("prelay_inter_token_seconds", _STEP_SECONDS)
        self.end_to_end = self._histogram("prelay_end_to_end_seconds", _SECONDS)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        help_text = name.removeprefix("prelay_").removesuffix("_seconds").replace("_", " ").capitalize()
        return Histogram(name, f"{help_text} in seconds", buckets=buckets, registry=self._registry)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(family.name for family in self._registry.collect())

    def render(self) -> bytes:
        return generate_latest(self._registry)

    @contextmanager
    def timed(self, n_prompt: int, clock: Callable[[], float]) -> "Iterator[RequestTimer]":
        """Measure one choice from here to the end of the block, however it ends."""
        timer = RequestTimer(self, n_prompt, clock)
        self.running.inc()
        try:
            yield timer
        except ClientLeft:
            raise
        except Exception:
            timer.finished("error")
            raise
        finally:
            self.running.dec()
            timer.close()


class RequestTimer:
    """Times one choice. Its tokens are counted as they come, so that long streams show up early."""

    def __init__(self, metrics: ApiMetrics, n_prompt: int, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._n_prompt = n_prompt
        self._clock = clock
        self._start = clock()
        self._last: float | None = None
        self._reason = "cancelled"

    def token(self) -> None:
        now = self._clock()
        if self._last is None:
            self._metrics.time_to_first_token.observe(now - self._start)
            self._metrics.prompt_tokens.inc(self._n_prompt)
        else:
            self._metrics.inter_token.observe(now - self._last)
        self._last = now
        self._metrics.generation_tokens.inc()

    def cached(self, n_tokens: int) -> None:
        self._metrics.cached_tokens.inc(n_tokens)

    def finished(self, reason: str) -> None:
        self._reason = reason

    def close(self) -> None:
        self._metrics.finished.labels(self._reason).inc()
        if self._reason in ("stop", "length"):
            self._metrics.end_to_end.observe(self._clock() - self._start)


class CountRequests:
    """ASGI middleware that counts each HTTP request by route template and status."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = NO_ANSWER

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            # The template, not the path: a client must not be able to make up new label values.
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.http_requests.labels(route, status).inc()
