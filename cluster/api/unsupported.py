"""Fields that we know and do not serve: their neutral values pass, any other one is refused with a reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.api.errors import unsupported
from cluster.api.schemas import Body


@dataclass(frozen=True, slots=True)
class Refused:
    """`neutral`: the values, besides null, that ask for nothing. `advice` ends the error's sentence."""

    neutral: tuple[Any, ...]
    advice: str = "leave it out"


_NO_LOGPROBS = Refused((False,), "log probabilities are not computed; leave it out or send null")
_NO_TOOLS = Refused(([],), "tools are not supported; leave them out")
_TEXT_ONLY = Refused(({"type": "text"},), "only free text is generated; leave it out")
_NO_HANDOFF = Refused((), "handoffs are arranged inside the cluster, never by a client; leave it out")
"""What other servers let a proxy, or whoever pretends to be one, put into a request."""

REFUSED: Mapping[str, Refused] = {
    "n": Refused((1,), "only n = 1 is served; send several requests or several prompts"),
    "best_of": Refused((1,), "only best_of = 1 is served"),
    "use_beam_search": Refused((False,)),
    "echo": Refused((False,), "the prompt is not sent back; leave it out or send false"),
    "suffix": Refused(("",), "insertion is not supported; leave it out"),
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": Refused((0,), _NO_LOGPROBS.advice),
    "prompt_logprobs": _NO_LOGPROBS,
    "min_p": Refused((0, 0.0), "use top_p or top_k"),
    "logit_bias": Refused(({},)),
    "allowed_token_ids": Refused(()),
    "bad_words": Refused(([],)),
    "tools": _NO_TOOLS,
    "tool_choice": Refused(("none", "auto"), _NO_TOOLS.advice),
    "functions": _NO_TOOLS,
    "function_call": Refused(("none", "auto"), _NO_TOOLS.advice),
    "response_format": _TEXT_ONLY,
    "structured_outputs": Refused(({},), _TEXT_ONLY.advice),
    "guided_json": Refused((), _TEXT_ONLY.advice),
    "guided_regex": Refused((), _TEXT_ONLY.advice),
    "guided_choice": Refused((), _TEXT_ONLY.advice),
    "guided_grammar": Refused((), _TEXT_ONLY.advice),
    "modalities": Refused((["text"],), _TEXT_ONLY.advice),
    "audio": Refused((), _TEXT_ONLY.advice),
    "prompt_embeds": Refused((), "send the prompt as text or token ids"),
    "truncate_prompt_tokens": Refused((), "shorten the prompt before you send it"),
    "chat_template": Refused((), "the model's own template is used; leave it out"),
    "kv_transfer_params": _NO_HANDOFF,
    "disaggregated_params": _NO_HANDOFF,
    "bootstrap_host": _NO_HANDOFF,
    "bootstrap_port": _NO_HANDOFF,
    "bootstrap_room": _NO_HANDOFF,
    "continue_final_message": Refused((False,), "send the text to /v1/completions instead"),
}


def check_unsupported(body: Body) -> None:
    """Raise 400 for the first field that asks for what is not served."""
    for field, value in (body.model_extra or {}).items():
        refused = REFUSED.get(field)
        if refused is not None and value is not None and not _is_neutral(value, refused.neutral):
            raise unsupported(f"{field} is not supported with this value: {refused.advice}.", field)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral)
