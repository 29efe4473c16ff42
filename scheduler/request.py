"""What a client asked for, as the schedulers see it: token ids in, limits, sampling."""

from dataclasses import dataclass, field
from enum import Enum

from scheduler.ids import RequestId


class FinishReason(Enum):
    """Why a request ended. STOP and LENGTH are the client's; the others are ours."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn. Temperature 0 is greedy; top_k 0 and top_p 1 switch those filters off.

    Draws use a counter-based generator keyed by (seed, position), so the same request continues with the same
    tokens on another node. repetition_penalty looks at the prompt and what was sampled, presence_penalty and
    frequency_penalty only at what was sampled, as in vLLM.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `max_tokens` >= 1 counts sampled tokens; `stop_token_ids` end the request after `min_tokens`.

    The stop token itself is part of the output. Before `min_tokens` tokens exist, stop tokens are not sampled.
    priority: lower runs earlier, where the queue policy looks at it. adapter, cache_salt: requests share cached blocks
    only with requests that have the same of both.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    adapter: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"{self.request_id}: the prompt has no tokens")
        if self.max_tokens < 1:
            raise ValueError(f"{self.request_id}: max_tokens is {self.max_tokens}, must be at least 1")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"{self.request_id}: min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}")

    def finish_after(self, n_outputs: int, token: int) -> FinishReason | None:
        """Whether the request ends with `token` as its `n_outputs`-th sampled token (counted from 1)."""
        if token in self.stop_token_ids and n_outputs > self.min_tokens:
            return FinishReason.STOP
        if n_outputs >= self.max_tokens:
            return FinishReason.LENGTH
        return None
