"""A silent peer is asked, and given up after its bound; the clock is the test's."""

from collections.abc import Iterator

import pytest

from handoff.transports.liveness import PEER_SILENCE_S, QUESTIONS, Liveness, Verdict

STEP_S = 0.1


def watched(liveness: Liveness, start: float, seconds: float, pending: bool = True) -> Iterator[tuple[float, Verdict]]:
    """Checks every STEP_S, up to and with the one that finds the peer lost."""
    for step in range(round(seconds / STEP_S) + 1):
        now = start + step * STEP_S
        verdict = liveness.check(now, pending)
        yield now, verdict
        if verdict is Verdict.LOST:
            return


def test_a_silent_peer_is_asked_several_times_and_then_given_up() -> None:
    seen = list(watched(Liveness(3.0), 100.0, 60.0))
    assert seen[-1][1] is Verdict.LOST
    assert 103.0 - 0.001 <= seen[-1][0] <= 103.0 + STEP_S + 0.001
    assert [verdict for _, verdict in seen].count(Verdict.ASK) == QUESTIONS - 1


def test_a_peer_that_answers_is_kept() -> None:
    liveness, asked = Liveness(3.0), 0
    for _, verdict in watched(liveness, 0.0, 60.0):
        assert verdict is not Verdict.LOST
        if verdict is Verdict.ASK:
            asked += 1
            liveness.heard()
    assert asked > 60 / 3.0 * (QUESTIONS - 2)


def test_a_peer_that_is_heard_all_the_time_is_never_asked() -> None:
    liveness = Liveness()
    for _, verdict in watched(liveness, 0.0, 10.0):
        assert verdict is Verdict.WAIT
        liveness.heard()


def test_silence_counts_from_the_operation_on() -> None:
    liveness = Liveness(3.0)
    assert {verdict for _, verdict in watched(liveness, 0.0, 100.0, pending=False)} == {Verdict.WAIT}
    lost = [now for now, verdict in watched(liveness, 101.0, 10.0) if verdict is Verdict.LOST]
    assert lost == [pytest.approx(104.0, abs=STEP_S + 0.001)]


def test_an_operation_that_ends_ends_the_count() -> None:
    liveness = Liveness(3.0)
    assert Verdict.LOST not in [verdict for _, verdict in watched(liveness, 0.0, 2.8)]
    liveness.check(2.9, pending=False)
    assert Verdict.LOST not in [verdict for _, verdict in watched(liveness, 3.0, 2.8)]


def test_a_gap_of_our_own_is_not_the_peers_silence() -> None:
    """This process was stopped for a minute: the peer still gets most of its questions."""
    liveness = Liveness(3.0)
    verdicts = [liveness.check(now, True) for now in (0.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0)]
    assert verdicts == [Verdict.WAIT] + [Verdict.ASK] * (QUESTIONS - 1) + [Verdict.LOST]


def test_the_bound_is_positive_and_far_above_a_busy_interpreter() -> None:
    assert PEER_SILENCE_S / QUESTIONS > 50 * 0.005
    with pytest.raises(ValueError, match="positive"):
        Liveness(0.0)
