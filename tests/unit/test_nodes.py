"""Nodes around their step loop: what is done and told at a boundary, and in which order."""

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from doctor_facts import COMPATIBILITY
from gate import Gate
from kv_machine import KvMachine, expected_output
from scheduler_drive import BLOCK_SIZE, decode_scheduler, handoff, prefill_scheduler, request

from decode_node.node import DecodeNode
from handoff.compatibility import Compatibility
from handoff.node import Node
from handoff.report import NodeReport
from handoff.transfer_ends import Broken, Landed, TransferEnd
from handoff.transfer_out import Progress
from handoff.wiring import PeerInfo
from prefill_node.node import PrefillNode
from scheduler.batching import BatchLimits
from scheduler.commands import (
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandEffects,
    ReleaseSource,
    ReserveDestination,
    SubmitHandoffPrefill,
)
from scheduler.contract import StepPlan
from scheduler.effects import Ticket
from scheduler.errors import InvariantBroken
from scheduler.events import DestinationReserved, LeaseExpired, Outputs, SourceHeld
from scheduler.ids import NodeId, RequestId

N = TypeVar("N", bound=Node[Any])

WAIT_S = 10.0
P, D = NodeId("prefill-0"), NodeId("decode-0")
X, Y = handoff("x"), handoff("y")


class RecordingExchange:
    """Notes what a node asks of it; the test ends transfers by `report`."""

    info = PeerInfo(P, 1, b"", COMPATIBILITY)

    def __init__(self, log: list[str], report: Callable[[TransferEnd], None]) -> None:
        self.report = report
        self.has_ended = False
        self._log = log

    def offer(self, peer: NodeId, handoff_id: str, attempt: int, *request: Any) -> None:
        self._log.append(f"offer {handoff_id} to {peer}")

    def sending_to(self, handoff_id: str, attempt: int) -> None:
        """Nothing is under way before `offer`."""

    def advance(self, handoff_id: str, attempt: int, progress: Progress) -> None:
        self._log.append(f"advance {handoff_id} to {progress.final}")

    def complete(self, handoff_id: str, attempt: int, held: Any) -> bool:
        self._log.append(f"complete {handoff_id}")
        return not self.has_ended

    def cease(self, handoff_id: str, attempt: int, reason: str) -> None:
        self._log.append(f"cease {handoff_id}: {reason}")

    def expect(self, handoff_id: str, attempt: int, reserved: Any) -> None:
        self._log.append(f"expect {handoff_id}")

    def withdraw(self, handoff_id: str, attempt: int) -> None:
        self._log.append(f"withdraw {handoff_id}")

    def links(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class Bench:
    """One node. log: what it did and told, in order. reports: all that it told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.reports: list[NodeReport] = []
        self.device = KvMachine(16, BLOCK_SIZE)
        self.clock: Callable[[], float] = time.monotonic

    def publish(self, report: NodeReport) -> None:
        self.reports.append(report)
        self.log += [f"output {output.request_id}" for output in report.outputs]
        self.log += [f"tell {type(event).__name__} {event.handoff_id}" for event in report.events]
        self.log += [f"tell {type(end).__name__} {end.handoff_id}" for end in report.transfers]

    def make_exchange(self, report: Callable[[TransferEnd], None], adapter_digest: Callable[[str], str]) -> Any:
        self.exchange = RecordingExchange(self.log, report)
        return self.exchange

    def prefill(self, **scheduler: Any) -> PrefillNode:
        make = self.make_exchange
        return PrefillNode(P, 1, prefill_scheduler(**scheduler), self.device, make, self.publish, self.clock)

    def decode(self, **scheduler: Any) -> DecodeNode:
        make = self.make_exchange
        return DecodeNode(D, 1, decode_scheduler(**scheduler), self.device, make, self.publish, self.clock)

    def until(self, line: str) -> None:
        """Wait for a line of the log."""
        deadline = time.monotonic() + WAIT_S
        while line not in self.log:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.001)


@contextmanager
def running(node: N) -> Iterator[N]:
    node._loop.start()
    yield node
    node.stop(WAIT_S)


def apply(node: Node[Any], command: Command) -> CommandEffects:
    return node.apply(command).result(WAIT_S)


def reserve(name: str, length: int = 6) -> ReserveDestination:
    return ReserveDestination(handoff(name), request(name, range(length)), activate_when_landed=True)


def landed(name: str, length: int = 6) -> Landed:
    first = expected_output(range(length), 1)[0]
    return Landed(handoff(name), 1, first, P, "test", 2, 64, 0.1)


def test_a_hold_is_sent_first_then_its_output_is_told_and_then_the_hold() -> None:
    bench = Bench()
    with running(bench.prefill()) as node:
        command = SubmitHandoffPrefill(X, request("a", [1, 2]))
        node.submit_prefill(command, D).result(WAIT_S)
        bench.until("tell SourceHeld x")
    assert bench.log == ["offer x to decode-0", "complete x", "output a", "tell SourceHeld x"]


def test_blocks_are_sent_as_chunk_after_chunk_makes_them_final() -> None:
    bench = Bench()
    with running(bench.prefill(limits=BatchLimits(max_tokens=6, max_sequences=4))) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", range(15))), D).result(WAIT_S)
        bench.until("tell SourceHeld x")
    sent = ["advance x to 1", "advance x to 3", "complete x", "output a", "tell SourceHeld x"]
    assert bench.log == ["offer x to decode-0", *sent]


def test_a_cancel_in_the_middle_of_a_prefill_ceases_its_transfer() -> None:
    bench, gate = Bench(), Gate()
    launch = bench.device.launch

    def gated(plan: StepPlan) -> Ticket:
        gate.enter()
        return launch(plan)

    bench.device.launch = gated  # type: ignore[method-assign]
    gate.hold(after_steps=2)
    with running(bench.prefill(limits=BatchLimits(max_tokens=4, max_sequences=4))) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", range(60))), D).result(WAIT_S)
        assert gate.wait_held(WAIT_S)
        cancelled = node.apply(CancelSource(X))
        gate.release()
        assert cancelled.result(WAIT_S).result == Applied()
        apply(node, CancelSource(Y))  # a boundary later
        assert node.status().result(WAIT_S)["drained"]
        assert node._streams == {}
    assert "advance x to 2" in bench.log
    assert "cease x: cancelled" in bench.log
    assert "complete x" not in bench.log


def test_a_request_that_ends_with_its_first_token_ceases_its_transfer() -> None:
    bench = Bench()
    with running(bench.prefill()) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", [1, 2], max_tokens=1)), D).result(WAIT_S)
        bench.until("cease x: the request ended at its source")
        assert node._streams == {}
    assert "complete x" not in bench.log


def test_a_hold_whose_transfer_has_ended_before_is_not_waited_for() -> None:
    bench = Bench()
    with running(bench.prefill()) as node:
        bench.exchange.has_ended = True
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", [1, 2])), D).result(WAIT_S)
        bench.until("tell SourceHeld x")
        assert apply(node, ReleaseSource(X)).result == Applied()
        assert node.status().result(WAIT_S)["drained"]


def test_a_hold_without_a_destination_waits_for_the_command() -> None:
    bench = Bench()
    with running(bench.prefill()) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", [1, 2])), None).result(WAIT_S)
        bench.until("tell SourceHeld x")
        assert node.start_transfer(X, 1, D).result(WAIT_S)
        assert not node.start_transfer(Y, 1, D).result(WAIT_S)
    assert bench.log == ["output a", "tell SourceHeld x", "offer x to decode-0", "complete x"]


def test_a_reservation_can_be_filled_before_it_is_told_and_is_told_once() -> None:
    bench = Bench()
    with running(bench.decode()) as node:
        effects = apply(node, reserve("x"))
        assert [type(event) for event in effects.events] == [DestinationReserved]
        bench.until("tell DestinationReserved x")
    assert bench.log == ["expect x", "tell DestinationReserved x"]


def test_what_a_transfers_end_causes_is_told_with_it() -> None:
    """The blocks of a broken transfer come free, and the next reservation gets them at the same boundary."""
    bench = Bench()
    with running(bench.decode()) as node:
        apply(node, reserve("x", 60))
        apply(node, reserve("y", 60))
        assert apply(node, CancelDestination(X)).result == Applied()
        bench.exchange.report(Broken(X, 1, "withdrawn"))
        bench.until("tell Broken x")
    assert bench.log[-2:] == ["tell DestinationReserved y", "tell Broken x"]
    assert bench.reports[-1].events
    assert bench.reports[-1].transfers


def test_a_landing_is_told_and_the_request_runs() -> None:
    bench = Bench()
    with running(bench.decode()) as node:
        apply(node, reserve("x"))
        bench.exchange.report(landed("x"))
        bench.until("tell DestinationFinished x")
    assert bench.log[1:] == [
        "tell DestinationReserved x",
        "tell Landed x",
        "output x",
        "output x",
        "output x",
        "tell DestinationFinished x",
    ]


def test_a_landing_that_nobody_wants_any_more_is_not_told() -> None:
    bench = Bench()
    with running(bench.decode()) as node:
        apply(node, reserve("x"))
        apply(node, CancelDestination(X))
        bench.exchange.report(landed("x"))
        assert node.status().result(WAIT_S)["drained"]
    assert "tell Landed x" not in bench.log


def test_an_expired_reservation_withdraws_its_transfer_and_drains_until_that_ends() -> None:
    bench = Bench()
    with structlog.testing.capture_logs() as logs, running(bench.decode(lease_s=0.05)) as node:
        apply(node, reserve("x"))
        bench.until("tell LeaseExpired x")
        assert bench.log[-2:] == ["withdraw x", "tell LeaseExpired x"]
        assert node.status().result(WAIT_S)["blocks"]["draining"] == 2
        bench.exchange.report(Broken(X, 1, "withdrawn"))
        status = node.status().result(WAIT_S)
        assert (status["drained"], status["counters"]["expired_leases"]) == (True, 1)
    (line,) = [line for line in logs if line["event"] == "lease expired"]
    assert (line["handoff_id"], line["request_id"], line["side"]) == ("x", "x", "destination")


def test_an_expired_hold_is_not_offered_any_more() -> None:
    bench = Bench()
    with running(bench.prefill(lease_s=0.05)) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", [1, 2])), None).result(WAIT_S)
        bench.until("tell LeaseExpired x")
        assert not node.start_transfer(X, 1, D).result(WAIT_S)
        assert node.status().result(WAIT_S)["drained"]


def test_an_armed_hold_that_is_offered_and_expires_drains_until_its_bytes_are_sent() -> None:
    bench = Bench()
    with running(bench.prefill(lease_s=0.05)) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", [1, 2])), D).result(WAIT_S)
        bench.until("tell LeaseExpired x")
        assert "cease x: its lease expired" in bench.log
        assert node.status().result(WAIT_S)["blocks"]["draining"] == 1
        bench.exchange.report(Broken(X, 1, "the peer was lost"))
        assert node.status().result(WAIT_S)["drained"]


def test_renewed_leases_live_on() -> None:
    bench = Bench()
    now = [0.0]
    bench.clock = lambda: now[0]
    with running(bench.decode(lease_s=10.0)) as node:
        apply(node, reserve("x"))
        for _ in range(8):
            now[0] += 9.0
            assert node.renew_leases([(X, 1), (X, 2), (Y, 1)]).result(WAIT_S) == 1
        node.status().result(WAIT_S)
        assert "tell LeaseExpired x" not in bench.log
        now[0] += 10.0
        node.status().result(WAIT_S)
        bench.until("tell LeaseExpired x")
        assert node.renew_leases([(X, 1)]).result(WAIT_S) == 0


def test_a_cancel_of_a_request_goes_before_what_came_earlier() -> None:
    bench = Bench()
    with running(bench.prefill()) as node:
        applied: list[Command] = []
        apply_command = node._scheduler.apply

        def note(command: Command, incarnation: int | None = None) -> CommandEffects:
            applied.append(command)
            return apply_command(command, incarnation)

        node._scheduler.apply = note  # type: ignore[method-assign]  # watched
        bench.device.gate.hold()
        first = SubmitHandoffPrefill(X, request("a", range(40)))
        node.submit_prefill(first, D)
        assert bench.device.gate.wait_held(WAIT_S)
        second, cancel = SubmitHandoffPrefill(Y, request("b", [1])), CancelRequest(RequestId("a"))
        futures = [node.submit_prefill(second, D), node.apply(cancel)]
        bench.device.gate.release()
        assert futures[1].result(WAIT_S).result == Applied()
        futures[0].result(WAIT_S)
        assert applied == [first, cancel, second]
        bench.until("tell SourceHeld y")
    assert "output a" not in bench.log


def test_the_story_of_a_request_is_known_after_its_end() -> None:
    bench = Bench()
    with running(bench.decode()) as node:
        apply(node, reserve("x"))
        apply(node, CancelDestination(X))
        bench.exchange.report(Broken(X, 1, "withdrawn"))
        lines = [line.what for line in node.story(RequestId("x")).result(WAIT_S)]
        assert lines[0] == "accepted as the destination of handoff x, attempt 1"
        assert "cancelled while reserved" in lines
        assert lines[-1] == "transfer quiet"
        assert node.story(RequestId("other")).result(WAIT_S) == ()


def test_the_status_has_every_number_that_operators_look_at() -> None:
    bench = Bench()
    with running(bench.prefill()) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", range(6))), None).result(WAIT_S)
        bench.until("tell SourceHeld x")
        status = node.status().result(WAIT_S)
    assert status["blocks"] == {
        "total": 16, "free": 14, "cached": 0, "held": 2, "reserved": 0, "draining": 0, "active": 0
    }  # fmt: skip
    assert status["requests"] == {"waiting": 0, "running": 0, "preempted": 0, "spilled": 0}
    assert status["work"]["decodes"] == {"count": 0, "sum": 0, "variance": 0.0}
    assert (status["kv_usage"], status["prefix_blocks"]) == (2 / 16, 1)
    assert Compatibility(**status["compatibility"]) == COMPATIBILITY
    counters = status["counters"]
    assert counters["prompt_tokens"] == counters["computed_tokens"] == 6
    for name in (
        "preemptions", "recomputed_tokens", "spills", "spill_failures", "restores", "restore_failures",
        "expired_leases", "suppressed_outputs", "prefix_hits", "failed_steps", "failed_effects",
    ):  # fmt: skip
        assert counters[name] == 0, name


def test_an_end_that_cannot_be_booked_stops_the_node() -> None:
    bench = Bench()
    node = bench.decode()
    node._loop.start()

    def fail(*_: Any) -> None:
        raise RuntimeError("no such handoff")

    node._scheduler.transfer_quiet = fail  # type: ignore[method-assign]  # a bug
    bench.exchange.report(Broken(X, 1, "lost"))
    node.ended.result(WAIT_S)
    assert isinstance(node.failure, InvariantBroken)
    assert "no such handoff" in str(node.failure)


def test_outputs_travel_as_columns() -> None:
    bench = Bench()
    with running(bench.decode()) as node:
        apply(node, reserve("x"))
        bench.exchange.report(landed("x"))
        bench.until("tell DestinationFinished x")
    columns = [report.outputs for report in bench.reports if report.outputs]
    assert all(isinstance(outputs, Outputs) for outputs in columns)
    assert [pickle.loads(pickle.dumps(outputs)) == outputs for outputs in columns] == [True] * 3


def test_the_events_that_end_leases_reach_the_report() -> None:
    bench = Bench()
    with running(bench.prefill(lease_s=0.05)) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", [1, 2])), None).result(WAIT_S)
        bench.until("tell LeaseExpired x")
    kinds = [type(event) for report in bench.reports for event in report.events]
    assert kinds == [SourceHeld, LeaseExpired]


def test_a_node_knows_when_the_steps_of_a_handoff_happened() -> None:
    bench = Bench()
    with running(bench.prefill()) as node:
        node.submit_prefill(SubmitHandoffPrefill(X, request("a", [1, 2])), D).result(WAIT_S)
        bench.until("tell SourceHeld x")
        (source,) = node.timelines()
    assert source["handoff_id"] == X
    assert 0 < source["computed"] <= source["posted"]
    bench = Bench()
    with running(bench.decode()) as node:
        apply(node, reserve("x"))
        bench.exchange.report(landed("x"))
        bench.until("tell DestinationFinished x")
        (times,) = node.timelines()
        assert node._unlaunched == {}
    assert source["posted"] <= times["ended"] <= times["booked"] <= times["launched"] <= time.monotonic()
    assert times["free_before_launched"] <= times["launched"]


def test_what_is_cancelled_before_its_first_step_is_not_waited_for() -> None:
    bench = Bench()
    node = bench.decode()
    node._mark_booked(RequestId("x"), (X, 1))
    node._on_retired(RequestId("x"))
    assert node._unlaunched == {}
