"""What every route needs, wired once by `create_app`."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.api.errors import ApiError
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

    def check_model(self, model: str | None) -> None:
        """Raise 404 for another model than ours. None means ours."""
        if model is not None and model != self.model_name:
            raise ApiError(
                404,
                f"The model {model!r} is not served here; this server has {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )
