"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, in vLLM's shapes."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from cluster.api.bodies import read_body
from cluster.api.context import ApiContext
from cluster.api.errors import ApiError, bad_request
from cluster.api.lora_names import ServedAdapter
from cluster.api.schemas import LoadAdapterBody, UnloadAdapterBody
from cluster.gateway import RequestRejected


def lora_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(http: Request) -> PlainTextResponse:
        body = await read_body(http, LoadAdapterBody, context.settings)
        async with context.lora.turn:
            await _load(body.lora_name, body.lora_path, context)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(http: Request) -> PlainTextResponse:
        body = await read_body(http, UnloadAdapterBody, context.settings)
        async with context.lora.turn:
            await _unload(body.lora_name, context)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


async def _load(name: str, path: str, context: ApiContext) -> None:
    """Raises ApiError 400 for a name that is taken, GatewayError."""
    _require_free(name, context)
    # Whatever ends this wait other than a success or a refusal leaves open which nodes have it.
    context.lora.leaving.add(name)
    try:
        await context.gateway.load_adapter(name, path)
    except RequestRejected:
        context.lora.leaving.discard(name)
        raise
    context.lora.leaving.discard(name)
    context.lora.served[name] = ServedAdapter(name, path, int(context.unix_time()))


async def _unload(name: str, context: ApiContext) -> None:
    """The name is taken out first, so that no new request uses it. Raises ApiError 404, GatewayError."""
    if name not in context.lora.served and name not in context.lora.leaving:
        raise ApiError(
            404, f"The LoRA adapter {name!r} is not loaded here.", param="lora_name", code="adapter_not_found"
        )
    context.lora.served.pop(name, None)
    context.lora.leaving.add(name)
    await context.gateway.unload_adapter(name)
    context.lora.leaving.discard(name)


def _require_free(name: str, context: ApiContext) -> None:
    if name == context.model_name:
        raise bad_request(f"{name!r} is the name of the base model; give the adapter another one.", "lora_name")
    if name in context.lora.served:
        raise bad_request(
            f"The LoRA adapter {name!r} is loaded already; unload it first or choose another name.", "lora_name"
        )
    if name in context.lora.leaving:
        raise bad_request(
            f"Some nodes may still have a LoRA adapter {name!r}; unload it first or choose another name.", "lora_name"
        )
