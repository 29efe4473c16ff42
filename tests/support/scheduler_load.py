"""What the scheduler machines are built with and fed: small pools, every policy, prompts that share prefixes."""

from dataclasses import dataclass
from typing import TypeAlias

from hypothesis import strategies as st
from truth import right_answer

from scheduler.batching import BatchLimits
from scheduler.ids import RequestId
from scheduler.policies import QUEUE_POLICIES, VICTIM_POLICIES, Preemption, SchedulingPolicy
from scheduler.request import Request

BLOCK_SIZE = 4
MAX_MODEL_LEN = 36
INCARNATION = 3
STEMS = ((1,) * 24, (1,) * 9 + (2,) * 15, tuple(range(24)))


@dataclass(frozen=True, slots=True)
class Setting:
    """One scheduler. own_limit: max_handoffs or max_reservations. spill_blocks: room of the spill store, None for any.

    finishes: whether the example ends with all that is owned running to its end, or with all of it being cancelled.
    """

    blocks: int
    limits: BatchLimits
    policy: SchedulingPolicy
    caching: bool
    own_limit: int
    lease_s: float
    spill_blocks: int | None
    finishes: bool


policies = st.builds(
    SchedulingPolicy,
    queue=st.sampled_from(QUEUE_POLICIES),
    preemption=st.sampled_from([Preemption.RECOMPUTE, Preemption.SPILL, Preemption.SPILL, Preemption.NONE]),
    victim=st.sampled_from(list(VICTIM_POLICIES)),
    immunity_tokens=st.sampled_from([0, 1, 3]),
    headroom_blocks=st.sampled_from([0, 0, 1]),
)
settings = st.builds(
    Setting,
    blocks=st.sampled_from([6, 6, 7, 8, 9, 12]),
    limits=st.sampled_from(
        [BatchLimits(4, 2), BatchLimits(6, 3), BatchLimits(9, 4), BatchLimits(9, 6), BatchLimits(30, 6)]
    ),
    policy=policies,
    caching=st.sampled_from([True, True, False]),
    own_limit=st.integers(1, 4),
    lease_s=st.sampled_from([float("inf"), 4.0, 10.0]),
    spill_blocks=st.sampled_from([None, None, 0, 4]),
    finishes=st.booleans(),
)


def _request(
    number: int,
    stem: int,
    shared: int,
    own: list[int],
    max_tokens: int,
    stop_at: int | None,
    min_tokens: int,
    priority: int,
    adapter: str | None,
) -> Request:
    """stop_at: the index of an output that is made a stop token."""
    prompt = (*STEMS[stem][:shared], *own) or (0,)
    request = Request(RequestId(f"r{number}"), prompt, max_tokens, priority=priority, adapter=adapter)
    if stop_at is None or stop_at >= max_tokens:
        return request
    stops = frozenset({right_answer(request).tokens[stop_at]})
    return Request(
        request.request_id,
        prompt,
        max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_token_ids=stops,
        priority=priority,
        adapter=adapter,
    )


requests = st.builds(
    _request,
    st.integers(0, 9),
    st.integers(0, 2),
    st.sampled_from([0, 1, 3, 4, 4, 5, 7, 8, 8, 12, 16]),
    st.sampled_from([[], [], [0], [1], [1, 2]]),
    st.sampled_from([1, 2, 5, 8, 10, 12, 14]),
    st.sampled_from([None] * 7 + [0, 2, 5]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([None, None, None, "a"]),
)
"""Most fit into the smallest pool; the longest are refused by it, or by the model's length."""


picks = st.integers(0, 40)
"""Chooses one of whatever there is, modulo its number."""
Act: TypeAlias = tuple[str, int, bool]
"""A method of the machine by its name, and its arguments."""
KINDS = (
    *["proceed"] * 3,
    *["end_transfer"] * 3,
    *["cancel_request"] * 3,
    *["cancel_handoff", "start_transfer", "renew"],
)
acts: st.SearchStrategy[Act] = st.tuples(st.sampled_from(KINDS), picks, st.booleans())
Arrival: TypeAlias = tuple[Request, str, int, bool]
"""A request, how it comes, and what decides about its ids, its attempt and whether it is armed."""
arrivals: st.SearchStrategy[Arrival] = st.tuples(
    requests, st.sampled_from(["submit"] * 6 + ["handoff"] * 6 + ["stray"]), picks, st.booleans()
)
moments = st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])
faults: st.SearchStrategy[tuple[int, ...]] = st.sampled_from([(), (), (), (0,), (1,), (0, 1, 2)])
"""Ordinals of effects that fail, counted from the next one."""


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count
