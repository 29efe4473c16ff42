"""The model's tokenizer and chat template, safe to use from several threads."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from cluster.api.detokenizer import Detokenizer, UnsupportedTokenizer, token_bytes_rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTemplateError", "ChatTokenizer", "UnsupportedTokenizer", "load_tokenizers"]


def load_tokenizers() -> Any:
    """The class `transformers.AutoTokenizer`; the first call takes seconds."""
    # Not at the top: every process that has a handle of the API imports this file.
    from transformers import AutoTokenizer

    return AutoTokenizer


class ChatTemplateError(ValueError):
    """The chat template is missing or refused the messages; the message is for the client."""


class ChatTokenizer:
    """Encodes text and chats, and decodes outputs. Raises UnsupportedTokenizer for one that it cannot stream.

    Encoding goes to the Rust tokenizer directly: the transformers wrapper sets truncation on each call, which
    fails when two threads encode at once.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedTokenizer("The model's tokenizer has no fast (Rust) form, which streaming needs.")
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._bytes_rule = token_bytes_rule(_decoder_json(backend))
        self._special_ids = frozenset(
            id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special
        ) | frozenset(tokenizer.all_special_ids)
        self._bytes: dict[int, bytes] = {}
        self._reserved_names = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self.vocab_size = len(tokenizer)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> "ChatTokenizer":
        """Load from a model folder or a hub name, as `transformers.AutoTokenizer` does."""
        return cls(load_tokenizers().from_pretrained(path, **options))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # Alone of the encoders, the batched ones let other threads run meanwhile (a long text takes 0.5 s).
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of `messages` under the model's chat template. Raises ChatTemplateError."""
        text = self._render(messages, add_generation_prompt, dict(template_options or {}))
        return self.encode(text, add_special_tokens=add_special_tokens)

    def _render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, options: dict[str, Any]
    ) -> str:
        if not self._tokenizer.chat_template:
            raise ChatTemplateError("This model has no chat template; send a prompt to /v1/completions instead.")
        if reserved := sorted(self._reserved_names & options.keys()):
            raise ChatTemplateError(f"chat_template_kwargs may not set {', '.join(reserved)}.")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"The model's chat template refused the messages: {error}") from error
        return str(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(token) or "" for token in tokens]

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh stream of text. Ids that the tokenizer does not know (padded vocabularies) have no text."""
        return Detokenizer(self._visible_bytes if skip_special_tokens else self._token_bytes)

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if token in self._special_ids else self._token_bytes(token)

    def _token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            string = self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if string is None else self._bytes_rule(string)
        return known


def _decoder_json(backend: Any) -> dict[str, Any] | None:
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())
