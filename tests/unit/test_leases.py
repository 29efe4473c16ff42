"""Leases: deadlines that the boundary's clock runs into."""

from math import inf, nan

import pytest
from scheduler_drive import handoff

from scheduler.leases import Leases

A, B, C = handoff("a"), handoff("b"), handoff("c")


def leases(duration_s: float = 10.0, **started: float) -> Leases:
    """started: when each began, by name."""
    kept = Leases(duration_s)
    for name, at in started.items():
        kept.renew(handoff(name), at)
    return kept


@pytest.mark.parametrize("duration_s", [0.0, -1.0, nan])
def test_a_lease_without_time_is_refused(duration_s: float) -> None:
    with pytest.raises(ValueError, match="a lease lasts longer than 0 s"):
        Leases(duration_s)


def test_a_lease_ends_exactly_at_its_deadline() -> None:
    kept = leases(a=3.0)
    assert kept.take_expired(12.999) == []
    assert A in kept
    assert kept.take_expired(13.0) == [A]
    assert A not in kept
    assert kept.take_expired(99.0) == []


def test_what_is_renewed_lasts_from_then_on() -> None:
    kept = leases(a=0.0)
    kept.renew(A, 9.0)
    assert kept.left(A, 9.0) == 10.0
    assert kept.take_expired(18.9) == []
    assert kept.take_expired(19.0) == [A]


def test_what_is_ended_never_expires() -> None:
    kept = leases(a=0.0, b=1.0)
    kept.end(A)
    kept.end(C)
    assert list(kept) == [B]
    assert kept.take_expired(100.0) == [B]


def test_the_oldest_deadline_comes_first() -> None:
    kept = leases(a=5.0, b=1.0, c=3.0)
    assert kept.take_expired(50.0) == [B, C, A]


def test_only_those_that_are_due_expire() -> None:
    kept = leases(a=0.0, b=2.0, c=4.0)
    assert kept.take_expired(12.0) == [A, B]
    assert list(kept) == [C]


def test_the_time_left_goes_down_and_below_zero() -> None:
    kept = leases(a=0.0)
    assert [kept.left(A, now) for now in (0.0, 4.0, 12.0)] == [10.0, 6.0, -2.0]
    assert kept.left(B, 0.0) is None


def test_nothing_expires_before_the_next_deadline() -> None:
    kept = leases(a=0.0, b=2.0)
    assert kept.next_deadline == 10.0
    # It may be early after a renewal, and is exact after the next look.
    kept.renew(A, 7.0)
    assert kept.next_deadline <= 12.0
    assert kept.take_expired(10.0) == []
    assert kept.next_deadline == 12.0
    assert kept.take_expired(12.0) == [B]
    assert kept.next_deadline == 17.0
    kept.end(A)
    assert kept.take_expired(17.0) == []
    assert kept.next_deadline == inf


def test_endless_leases_never_expire() -> None:
    kept = leases(inf, a=0.0)
    assert (kept.next_deadline, kept.left(A, 1e9)) == (inf, inf)
    assert kept.take_expired(1e18) == []
    assert A in kept
