"""Tokenizing without holding up the streams of other clients."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cluster.api.context import ApiContext
from cluster.api.errors import bad_request
from cluster.api.schemas import ChatMessage
from cluster.api.tokenizer import ChatTemplateError


async def encode_text(text: str, context: ApiContext, *, add_special_tokens: bool) -> tuple[int, ...]:
    encode = partial(context.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return await _aside(encode, len(text), context)


async def encode_messages(
    messages: Sequence[ChatMessage],
    context: ApiContext,
    *,
    add_generation_prompt: bool,
    add_special_tokens: bool,
    template_options: dict[str, Any] | None,
) -> tuple[int, ...]:
    """Raises ApiError 400 when there are no messages or the chat template refuses them."""
    if not messages:
        raise bad_request("messages is empty; send at least one message.", "messages")
    encode = partial(
        context.tokenizer.encode_chat,
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
        add_special_tokens=add_special_tokens,
        template_options=template_options,
    )
    try:
        return await _aside(encode, sum(len(message.text) for message in messages), context)
    except ChatTemplateError as error:
        raise bad_request(str(error), "messages") from None


async def _aside(encode: Callable[[], tuple[int, ...]], n_chars: int, context: ApiContext) -> tuple[int, ...]:
    if n_chars <= context.settings.inline_encode_chars:
        return encode()
    return await asyncio.to_thread(encode)
