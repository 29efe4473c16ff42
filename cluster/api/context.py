"""What every route needs, wired once by `create_app`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.api.errors import ApiError
from cluster.api.lora_names import LoraNames
from cluster.api.metrics import ApiMetrics
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ChatTokenizer
from cluster.gateway import Gateway
from scheduler.ids import RequestId


@dataclass(frozen=True, slots=True)
class ApiContext:
    """clock: seconds from any start, for durations. unix_time: seconds since the epoch, for `created`."""

    gateway: Gateway
    tokenizer: ChatTokenizer
    model_name: str
    max_model_len: int
    eos_token_ids: frozenset[int]
    settings: ApiSettings
    metrics: ApiMetrics
    new_request_id: Callable[[], RequestId]
    new_seed: Callable[[], int]
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    lora: LoraNames = field(default_factory=LoraNames)

    def check_model(self, model: str | None) -> None:
        """Raise 404 for another model than ours and its adapters. None means ours."""
        if model is not None and model != self.model_name and model not in self.lora.served:
            names = ", ".join(map(repr, (self.model_name, *self.lora.served)))
            raise ApiError(
                404,
                f"The model {model!r} is not served here; this server has {names}.",
                param="model",
                code="model_not_found",
            )

    def name_of(self, model: str | None) -> str:
        """What an answer calls a checked `model`."""
        return self.model_name if model is None else model

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a checked `model` names; None for the base model.

        Not looked up again: a name that was taken away since must fail in the cluster, not run under the base model.
        """
        return None if model == self.model_name else model
