"""Every limit of the HTTP API, by name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits of the HTTP API. Sizes are in the unit that ends the name, times in seconds.

    max_body_bytes: a longer request body is refused (413) as soon as the limit is passed.
    body_timeout_s: how long a client may take to send its whole body (408).
    next_token_timeout_s: the longest silence of the cluster within one request, queueing included.
    client_write_timeout_s: how long one event may wait for a client that does not read.
    close_timeout_s: how long the cancellation of a request may take before it is logged and left.
    status_timeout_s: how long `/metrics`, `/health` and `/cluster/status` wait for the cluster.
    retry_after_s: the `Retry-After` of a 429.
    inline_encode_chars: longer texts are tokenized in a thread, so that other streams go on meanwhile.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 60.0
    next_token_timeout_s: float = 600.0
    client_write_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
    status_timeout_s: float = 5.0
    retry_after_s: int = 1
    inline_encode_chars: int = 2_000
    max_prompts: int = 64
    max_stop_strings: int = 32
    max_stop_chars: int = 512
    max_stop_token_ids: int = 1_024
