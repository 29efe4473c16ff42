"""From a checked body and prompt tokens to the cluster's `Request`."""

from collections.abc import Sequence

from cluster.api.context import ApiContext
from cluster.api.errors import bad_request
from cluster.api.schemas import GenerationBody
from cluster.api.settings import ApiSettings
from scheduler.request import Request, SamplingParams

MIN_TEMPERATURE = 0.01
"""Smaller ones, 0 aside, are raised to it, as in vLLM: logits over them overflow."""


def check_generation(body: GenerationBody, context: ApiContext) -> None:
    """The checks that need no prompt. Raises ApiError 400."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is for streams; send stream: true or leave it out.", "stream_options")
    _check_stop(body.stop_strings, context.settings)
    _check_stop_tokens(body.stop_token_ids or [], context)
    if body.top_k is not None and body.top_k > context.tokenizer.vocab_size:
        raise bad_request(f"top_k is over the vocabulary size {context.tokenizer.vocab_size}.", "top_k")


def _check_stop(stops: Sequence[str], settings: ApiSettings) -> None:
    if len(stops) > settings.max_stop_strings:
        raise bad_request(f"stop may list at most {settings.max_stop_strings} strings, not {len(stops)}.", "stop")
    if not all(stops):
        raise bad_request("stop has an empty string; remove it.", "stop")
    if any(len(stop) > settings.max_stop_chars for stop in stops):
        raise bad_request(f"A stop string may have at most {settings.max_stop_chars} characters.", "stop")


def _check_stop_tokens(tokens: Sequence[int], context: ApiContext) -> None:
    limit = context.settings.max_stop_token_ids
    if len(tokens) > limit:
        raise bad_request(f"stop_token_ids may list at most {limit} ids, not {len(tokens)}.", "stop_token_ids")
    check_token_ids(tokens, context.tokenizer.vocab_size, "stop_token_ids")


def check_token_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            raise bad_request(f"{param} has the id {token}, outside the vocabulary (0 to {vocab_size - 1}).", param)


def build_request(
    body: GenerationBody,
    prompt: tuple[int, ...],
    context: ApiContext,
    *,
    asked_max_tokens: int | None,
    default_max_tokens: int | None,
    prompt_param: str,
) -> Request:
    """One request to the cluster. `default_max_tokens` None means all that fits. Raises ApiError 400."""
    max_tokens = _max_tokens(len(prompt), context.max_model_len, asked_max_tokens, default_max_tokens, prompt_param)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens {min_tokens} is over the {max_tokens} tokens that may come.", "min_tokens")
    stop_tokens = frozenset(body.stop_token_ids or ())
    return Request(
        request_id=context.new_request_id(),
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_tokens if body.ignore_eos else stop_tokens | context.eos_token_ids,
        sampling=_sampling(body, context),
        priority=body.priority or 0,
        adapter=context.adapter_of(body.model),
        cache_salt=body.cache_salt,
    )


def _max_tokens(n_prompt: int, max_model_len: int, asked: int | None, default: int | None, prompt_param: str) -> int:
    code = "context_length_exceeded"
    if n_prompt == 0:
        raise bad_request("The prompt is empty; send at least one token.", prompt_param)
    left = max_model_len - n_prompt
    if left < 1:
        raise bad_request(
            f"The prompt has {n_prompt} tokens and the model's context {max_model_len}, which leaves none for the "
            "answer; shorten the prompt.",
            prompt_param,
            code,
        )
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise bad_request(
            f"max_tokens is {asked}, but after a prompt of {n_prompt} tokens the model's context of "
            f"{max_model_len} has room for {left}; ask for fewer tokens or shorten the prompt.",
            "max_tokens",
            code,
        )
    return asked


def _sampling(body: GenerationBody, context: ApiContext) -> SamplingParams:
    temperature = 1.0 if body.temperature is None else body.temperature
    seed = context.new_seed() if body.seed is None else body.seed
    return SamplingParams(
        temperature=temperature if temperature == 0.0 else max(temperature, MIN_TEMPERATURE),
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=seed % 2**63,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
    )
