"""Whether a request can be served on this node at all. What can't is rejected with what was wrong and what to do."""

from scheduler.errors import CommandRejected
from scheduler.kv import KvAccounting
from scheduler.sequence import Sequence


def require_servable(sequence: Sequence, kv: KvAccounting, max_model_len: int) -> None:
    """Raises CommandRejected where waiting would not help: an unknown adapter, more tokens than model or pool hold."""
    if sequence.adapter is not None and sequence.adapter not in kv.adapters:
        raise CommandRejected(f"adapter {sequence.adapter} is not loaded on this node: load it on all nodes first")
    lengths = f"{sequence.prompt_tokens} prompt tokens and {sequence.output_limit} new ones"
    if sequence.prompt_tokens + sequence.output_limit > max_model_len + 1:
        raise CommandRejected(
            f"{lengths} exceed the model's {max_model_len} positions: shorten the prompt or lower max_tokens"
        )
    needed = kv.footprint(sequence)
    if needed > kv.pool.total:
        raise CommandRejected(
            f"{lengths} need {needed} KV blocks, the node has {kv.pool.total}: shorten the request "
            "or give the node more KV memory"
        )
