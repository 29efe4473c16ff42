"""`POST /v1/completions`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cluster.api.answers import answer
from cluster.api.bodies import read_body
from cluster.api.context import ApiContext
from cluster.api.encoding import encode_text
from cluster.api.errors import bad_request
from cluster.api.generation import Choice, Delta, new_choice
from cluster.api.responses import Completion, CompletionChoice, Usage
from cluster.api.schemas import CompletionBody
from cluster.api.unsupported import check_unsupported
from cluster.api.validation import build_request, check_generation, check_token_ids

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionShape:
    answer_id: str
    created: int
    model: str

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        return self._completion([_choice(c, c.text, c.token_ids) for c in choices], usage)

    def chunk(self, delta: Delta, usage: Usage | None) -> Completion:
        return self._completion([_choice(delta.choice, delta.text, delta.token_ids)], usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=self.answer_id, created=self.created, model=self.model, choices=choices, usage=usage)


def _choice(choice: Choice, text: str, token_ids: list[int] | None) -> CompletionChoice:
    return CompletionChoice(index=choice.index, text=text, finish_reason=choice.finish, token_ids=token_ids)


def completions_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(http: Request) -> Response:
        body = await read_body(http, CompletionBody, context.settings)
        context.check_model(body.model)
        check_unsupported(body)
        check_generation(body, context)
        choices = [
            _new_choice(index, tokens, body, context) for index, tokens in enumerate(await _prompts(body, context))
        ]
        shape = CompletionShape(
            f"cmpl-{choices[0].request.request_id}", int(context.unix_time()), context.name_of(body.model)
        )
        return await answer(http, body, choices, shape, context)

    return router


def _new_choice(index: int, prompt: tuple[int, ...], body: CompletionBody, context: ApiContext) -> Choice:
    request = build_request(
        body,
        prompt,
        context,
        asked_max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
    )
    return new_choice(index, request, body, context)


async def _prompts(body: CompletionBody, context: ApiContext) -> list[tuple[int, ...]]:
    """Token ids of each prompt. Raises ApiError 400."""
    prompts = _as_list(body.prompt)
    if not prompts:
        raise bad_request("prompt is empty; send a text or token ids.", "prompt")
    if len(prompts) > context.settings.max_prompts:
        raise bad_request(
            f"prompt may list at most {context.settings.max_prompts} prompts, not {len(prompts)}.", "prompt"
        )
    return [await _tokens(prompt, body, context) for prompt in prompts]


def _as_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str] | list[list[int]]", prompt))


async def _tokens(prompt: str | list[int], body: CompletionBody, context: ApiContext) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if not prompt:
            raise bad_request("prompt is an empty string; send a text.", "prompt")
        return await encode_text(prompt, context, add_special_tokens=body.add_special_tokens is not False)
    check_token_ids(prompt, context.tokenizer.vocab_size, "prompt")
    return tuple(prompt)
