"""Request bodies. Types are strict; unknown fields are kept aside, so that refused ones can be found."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TEXT_OR_TOKENS = "a string, a list of token ids, a list of strings or a list of lists of token ids"


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(Body):
    """Fields that both completion routes share. None always means the default."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    stop: str | list[str] | None = Field(None, description="a string or a list of strings")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    return_token_ids: bool | None = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    prompt: str | list[int] | list[str] | list[list[int]] = Field(description=TEXT_OR_TOKENS)
    add_special_tokens: bool | None = True


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = Field(description='a string or a list of {"type": "text", "text": ...} parts')

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: they have no role `developer`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class ChatFields(Body):
    messages: list[ChatMessage]
    add_generation_prompt: bool | None = True
    add_special_tokens: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(ChatFields, GenerationBody):
    max_completion_tokens: int | None = Field(None, ge=1)


class TokenizeBody(Body):
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = True
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    tokens: list[int]


class LoadAdapterBody(Body):
    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1)
