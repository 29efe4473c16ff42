"""Stand-ins for the cluster and the model's tokenizer: for tests, and to try the API alone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cluster.gateway import GatewayError, TokenOutput
from scheduler.ids import RequestId
from scheduler.request import FinishReason, Request

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Script:
    """What the cluster does for one request: sample `tokens`, then raise `error`, or fall silent without one.

    A script ends earlier where the request does: at its stop tokens and its `max_tokens`.
    """

    tokens: Iterable[int] = ()
    error: GatewayError | None = None
    step_s: float = 0.0
    cached_tokens: int = 0
    early_finish: FinishReason | None = None


@dataclass(slots=True)
class ScriptedGateway:
    """A Gateway that plays scripts, and records its requests and those that were closed before their end.

    stories: lines by request; any other request is unknown. adapters: paths by name; adapter_error: what a change of
    them raises.
    """

    script: Callable[[Request], Script]
    status_json: dict[str, Any] = field(default_factory=dict)
    status_error: Exception | None = None
    stories: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    silent: list[dict[str, Any]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    adapter_error: Exception | None = None

    async def generate(self, request: Request) -> AsyncIterator[TokenOutput]:
        self.requests.append(request)
        is_finished = False
        try:
            async for output in self._outputs(request, self.script(request)):
                is_finished = output.finish is not None
                yield output
        finally:
            if not is_finished:
                # A real cancellation awaits the cluster, so cleanup must be allowed to await.
                await asyncio.sleep(0)
                self.cancelled.append(request.request_id)

    async def _outputs(self, request: Request, script: Script) -> AsyncIterator[TokenOutput]:
        for index, token in enumerate(script.tokens):
            await asyncio.sleep(script.step_s)
            finish = request.finish_after(index + 1, token) or script.early_finish
            yield TokenOutput(index, token, finish, script.cached_tokens if index == 0 else None)
            if finish is not None:
                return
        if script.error is not None:
            raise script.error
        await asyncio.Event().wait()

    async def load_adapter(self, name: str, path: str) -> None:
        if self.adapter_error is not None:
            raise self.adapter_error
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        if self.adapter_error is not None:
            raise self.adapter_error
        del self.adapters[name]

    async def status(self) -> dict[str, Any]:
        if self.status_error is not None:
            raise self.status_error
        return self.status_json

    async def story(self, request_id: RequestId) -> dict[str, Any]:
        if self.status_error is not None:
            raise self.status_error
        return {"request_id": request_id, "lines": self.stories.get(request_id, []), "silent": self.silent}


def _wrap(**options: Any) -> PreTrainedTokenizerFast:
    wrapper: Any = PreTrainedTokenizerFast  # its constructor has no types
    tokenizer: PreTrainedTokenizerFast = wrapper(**options)
    return tokenizer


def byte_level_tokenizer(corpus: Iterable[str], vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A Llama-3-style tokenizer with a chat template, trained on `corpus`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return _wrap(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], chat_template=CHAT_TEMPLATE)


def byte_fallback_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A Llama-2-style tokenizer: the characters of `words` are tokens, any other one falls back to its bytes."""
    alphabet = sorted(set("".join(words)) - {" "})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *alphabet]
    vocab = {name: id_ for id_, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return _wrap(tokenizer_object=tokenizer, eos_token="</s>", chat_template=CHAT_TEMPLATE)
