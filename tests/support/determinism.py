"""Hypothesis settings of the property tier: the same examples every time, whatever the machine's speed."""

from hypothesis import HealthCheck, settings


def deterministic(max_examples: int, steps: int = 50) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
