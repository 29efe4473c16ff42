"""Response bodies of the completion routes, as OpenAI and vLLM shape them."""

from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """A whole completion, or one chunk of a streamed one (`usage` is then null but for the last)."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class ChatAnswer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswer
    logprobs: None = None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """The first delta of a choice also names the role."""

    content: str


class FirstChatDelta(ChatDelta):
    role: Literal["assistant"] = "assistant"


class ChatChunkChoice(BaseModel):
    index: int
    delta: FirstChatDelta | ChatDelta
    logprobs: None = None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None
