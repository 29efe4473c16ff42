"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from typing import Any

from fastapi import APIRouter, Request

from cluster.api.bodies import read_body
from cluster.api.context import ApiContext
from cluster.api.encoding import encode_messages, encode_text
from cluster.api.errors import bad_request
from cluster.api.schemas import DetokenizeBody, TokenizeBody
from cluster.api.unsupported import check_unsupported
from cluster.api.validation import check_token_ids


def tokens_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(http: Request) -> dict[str, Any]:
        body = await read_body(http, TokenizeBody, context.settings)
        context.check_model(body.model)
        check_unsupported(body)
        tokens = await _encode(body, context)
        strings = context.tokenizer.token_strings(tokens) if body.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": context.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }

    @router.post("/detokenize")
    async def detokenize(http: Request) -> dict[str, str]:
        body = await read_body(http, DetokenizeBody, context.settings)
        context.check_model(body.model)
        check_token_ids(body.tokens, context.tokenizer.vocab_size, "tokens")
        return {"prompt": context.tokenizer.decode(body.tokens)}

    return router


async def _encode(body: TokenizeBody, context: ApiContext) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt")
    if body.prompt is not None:
        return await encode_text(body.prompt, context, add_special_tokens=body.add_special_tokens is not False)
    return await encode_messages(
        body.messages or [],
        context,
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        template_options=body.chat_template_kwargs,
    )
