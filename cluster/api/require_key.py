"""Where a server has API keys, every route but those of health and metrics wants one."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.errors import ApiError
from cluster.api_keys import ApiKeys

OPEN_PATHS = frozenset({"/health", "/metrics", "/prometheus/metrics"})
"""For probes and scrapers, which have no key: they tell of load, not of requests."""


class RequireKey:
    """ASGI middleware. Notes the key's name as the request's tenant, see `tenant_of`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                tenant = self._tenant(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if not values:
            raise _refusal("This server wants an API key. Send it as a header, `Authorization: Bearer KEY`.")
        scheme, _, key = values[0].partition(b" ")
        tenant = self._keys.name_of(key.strip()) if len(values) == 1 and scheme.lower() == b"bearer" else None
        if tenant is None:
            raise _refusal("This is no API key of this server. It is sent as a header, `Authorization: Bearer KEY`.")
        return tenant


def tenant_of(request: Request) -> str | None:
    """The name of the key that a request came with; None where no keys are wanted."""
    tenant: str | None = getattr(request.state, "tenant", None)
    return tenant


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
