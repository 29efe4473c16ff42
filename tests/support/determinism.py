"""Hypothesis settings of the property tier: the same examples every time, whatever the machine's speed.

PRELAY_SOAK=20 runs twenty times as many examples and other ones each time (`make soak`, which names its seed).
"""

import os
from collections import Counter

from hypothesis import HealthCheck, settings

SOAK = int(os.environ.get("PRELAY_SOAK", "0"))

steps_taken: Counter[str] = Counter()
"""Rules that the state machines have run in this process, by machine; printed at the end of the tests."""


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
