"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cluster.api.answers import answer
from cluster.api.bodies import read_body
from cluster.api.context import ApiContext
from cluster.api.encoding import encode_messages
from cluster.api.generation import Choice, Delta, new_choice
from cluster.api.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FirstChatDelta,
    Usage,
)
from cluster.api.schemas import ChatBody
from cluster.api.unsupported import check_unsupported
from cluster.api.validation import build_request, check_generation


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The first token's chunk also names the role, so that each chunk stands for one token."""

    answer_id: str
    created: int
    model: str

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        answers = [
            ChatChoice(index=c.index, message=ChatAnswer(content=c.text), finish_reason=c.finish, token_ids=c.token_ids)
            for c in choices
        ]
        return ChatCompletion(id=self.answer_id, created=self.created, model=self.model, choices=answers, usage=usage)

    def chunk(self, delta: Delta, usage: Usage | None) -> ChatChunk:
        content = FirstChatDelta(content=delta.text) if delta.is_first else ChatDelta(content=delta.text)
        choice = ChatChunkChoice(
            index=delta.choice.index,
            delta=content,
            finish_reason=delta.choice.finish,
            token_ids=delta.token_ids,
        )
        return self._chunk([choice], usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(id=self.answer_id, created=self.created, model=self.model, choices=choices, usage=usage)


def chat_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(http: Request) -> Response:
        body = await read_body(http, ChatBody, context.settings)
        context.check_model(body.model)
        check_unsupported(body)
        check_generation(body, context)
        choice = await _choice(body, context)
        shape = ChatShape(
            f"chatcmpl-{choice.request.request_id}", int(context.unix_time()), context.name_of(body.model)
        )
        return await answer(http, body, [choice], shape, context)

    return router


async def _choice(body: ChatBody, context: ApiContext) -> Choice:
    prompt = await encode_messages(
        body.messages,
        context,
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        template_options=body.chat_template_kwargs,
    )
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = build_request(
        body, prompt, context, asked_max_tokens=asked, default_max_tokens=None, prompt_param="messages"
    )
    return new_choice(0, request, body, context)
