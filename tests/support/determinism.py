"""Where randomness of the tests comes from: the same examples and seeds every time, whatever the machine's speed.

PRELAY_SOAK=20 runs twenty times as many Hypothesis examples, and other ones each time (`make soak` names its seed).
PRELAY_SEED=7 runs seeded tests with this seed only (`make sim SEED=7`).
"""

import os
from collections import Counter

from hypothesis import HealthCheck, settings

SOAK = int(os.environ.get("PRELAY_SOAK", "0"))

steps_taken: Counter[str] = Counter()
"""Rules that the state machines have run in this process, by machine; printed at the end of the tests."""


def seeds(count: int) -> list[int]:
    """What a seeded test runs with: `count` seeds, or the one that was asked for."""
    asked = os.environ.get("PRELAY_SEED", "")
    return [int(asked)] if asked else list(range(count))


def deterministic(max_examples: int, steps: int = 50) -> settings:
    """max_examples: of one run, times PRELAY_SOAK if that is set. steps: rules per example of a state machine."""
    return settings(
        max_examples=max_examples * max(1, SOAK),
        stateful_step_count=steps,
        deadline=None,
        derandomize=not SOAK,
        database=None,
        print_blob=bool(SOAK),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
