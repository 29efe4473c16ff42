"""Both schedulers under commands in any order, with steps, failures and transfer notes between them.

The model knows what it asked for and computes every right token by itself. After each rule the accounting must hold;
at the end everything is cancelled and nothing may be owned.
"""

from determinism import deterministic
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_machine import KvMachine, expected_output
from scheduler_drive import BLOCK_SIZE, Stepper, copy_blocks, decode_scheduler, prefill_scheduler

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    BoundaryEffects,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    CommandEffects,
    DestinationFinished,
    DestinationReserved,
    Noop,
    ReleaseSource,
    ReserveDestination,
    SourceFinished,
    SourceHeld,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.contract import StepPlan
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.errors import CommandRejected
from scheduler.ids import HandoffId, RequestId
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import FinishReason, Request

POOL = 12
LIMITS = BatchLimits(max_tokens=6, max_sequences=3)
STEMS = [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8), (9, 9, 9, 9, 9, 9, 9, 9, 9), ()]
prompts = st.tuples(st.sampled_from(STEMS), st.lists(st.integers(0, 3), min_size=1, max_size=12)).map(
    lambda parts: (*parts[0], *parts[1])
)
handoffs = st.integers(0, 5)
attempts = st.sampled_from([1, 1, 1, 2])
max_tokens = st.integers(1, 9)


class SchedulerMachine(RuleBasedStateMachine):
    """What both sides share: requests by name, their right outputs, and the steps."""

    scheduler: PrefillScheduler | DecodeScheduler

    def __init__(self) -> None:
        super().__init__()
        self.stepper = Stepper(self.scheduler)
        self.requests: dict[str, Request] = {}
        self.live: set[str] = set()
        self.plan: StepPlan | None = None

    @property
    def device(self) -> KvMachine:
        return self.stepper.device

    def apply(self, command: Command) -> CommandEffects | None:
        """None if it was rejected; a rejection must change nothing."""
        before = self.scheduler.occupancy(), self.scheduler.kv.committed
        try:
            effects = self.scheduler.apply(command)
        except CommandRejected:
            assert (self.scheduler.occupancy(), self.scheduler.kv.committed) == before
            return None
        if isinstance(effects.result, Noop):
            assert not effects.retired
        self.retire(effects.retired)
        self.see(BoundaryEffects(events=effects.events))
        return effects

    def retire(self, names: tuple[RequestId, ...]) -> None:
        for name in names:
            assert name in self.live, f"{name} was retired twice"
            self.live.remove(name)

    def accept(self, request: Request, command: Command) -> None:
        known = request.request_id in self.live
        if self.apply(command) is not None:
            assert not known
            self.live.add(request.request_id)
            self.requests[request.request_id] = request

    def request(self, number: int, prompt: tuple[int, ...], tokens: int) -> Request:
        return Request(RequestId(f"r{number}"), prompt, tokens)

    @rule(number=handoffs, prompt=prompts, tokens=max_tokens)
    def submit(self, number: int, prompt: tuple[int, ...], tokens: int) -> None:
        request = self.request(number, prompt, tokens)
        self.accept(request, Submit(request))

    @rule(number=handoffs)
    def cancel_request(self, number: int) -> None:
        self.apply(CancelRequest(RequestId(f"r{number}")))

    @rule(count=st.integers(1, 4), fails=st.sampled_from([False, False, False, True]))
    def steps(self, count: int, fails: bool) -> None:
        for _ in range(count):
            if fails:
                self.device.fail_at.add(self.device.steps)
            effects = self.stepper.step()
            self.device.fail_at.clear()
            if effects is None:
                return
            self.see(effects)
            self.retire(effects.retired)

    def see(self, effects: BoundaryEffects) -> None:
        for output in effects.outputs:
            if output.token is None:
                assert output.finish is FinishReason.ERROR
                continue
            request = self.requests[output.request_id]
            expected = expected_output(request.prompt, output.index + 1)
            assert output.token == expected[output.index], output

    def after_notes(self) -> None:
        effects = self.scheduler.take_effects()
        self.retire(effects.retired)
        self.see(effects)

    @invariant()
    def accounts(self) -> None:
        self.scheduler.check()
        occupancy = self.scheduler.occupancy()
        assert 0 <= self.scheduler.kv.committed <= POOL
        assert occupancy.free + occupancy.cached + self.scheduler.kv.pool.used == POOL
        assert self.scheduler.is_drained == (not self.live)
        if self.scheduler.is_drained:
            assert self.scheduler.kv.committed == 0

    def cancel_handoffs(self) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        self.cancel_handoffs()
        for name in list(self.live):
            self.apply(CancelRequest(RequestId(name)))
        self.scheduler.check()
        assert self.scheduler.is_drained
        assert not self.live
        assert self.scheduler.plan() is None
        assert self.scheduler.kv.pool.available == POOL


class PrefillMachine(SchedulerMachine):
    """held: handoffs whose KV can be sent. sending: those whose blocks the transport reads, with their content."""

    def __init__(self) -> None:
        self.scheduler = self.prefill = prefill_scheduler(POOL, limits=LIMITS, max_model_len=32)
        self.sending: dict[tuple[HandoffId, int], tuple[tuple[int, ...], bytes]] = {}
        super().__init__()

    def content(self, blocks: tuple[int, ...], tokens: int) -> bytes:
        size = self.device.facts().block_bytes
        joined = b"".join(self.device.pool[block * size : (block + 1) * size].tobytes() for block in blocks)
        return joined[: tokens * size // BLOCK_SIZE]

    @rule(number=handoffs, prompt=prompts, tokens=max_tokens, attempt=attempts)
    def submit_prefill(self, number: int, prompt: tuple[int, ...], tokens: int, attempt: int) -> None:
        request = self.request(number, prompt, tokens)
        self.accept(request, SubmitHandoffPrefill(HandoffId(f"h{number}"), request, attempt))

    @rule(number=handoffs, attempt=attempts, cancel=st.booleans())
    def end_source(self, number: int, attempt: int, cancel: bool) -> None:
        handoff_id = HandoffId(f"h{number}")
        self.apply(CancelSource(handoff_id, attempt) if cancel else ReleaseSource(handoff_id, attempt))

    @rule(number=handoffs, attempt=attempts)
    def start_transfer(self, number: int, attempt: int) -> None:
        key = HandoffId(f"h{number}"), attempt
        held = self.prefill.held(*key)
        if held is None or key in self.sending:
            return
        request = self.requests[held.request_id]
        assert held.prompt_tokens == len(request.prompt)
        assert held.first_token == expected_output(request.prompt, 1)[0]
        assert len(held.blocks) == -(-held.prompt_tokens // BLOCK_SIZE)
        self.prefill.transfer_started(*key)
        self.sending[key] = held.blocks, self.content(held.blocks, held.prompt_tokens)

    @rule(number=handoffs, attempt=attempts)
    def end_transfer(self, number: int, attempt: int) -> None:
        key = HandoffId(f"h{number}"), attempt
        self.sending.pop(key, None)
        self.prefill.transfer_quiet(*key)
        self.after_notes()

    @invariant()
    def what_is_read_does_not_change(self) -> None:
        for blocks, before in self.sending.values():
            now = self.content(blocks, len(before) * BLOCK_SIZE // self.device.facts().block_bytes)
            assert now == before

    def see(self, effects: BoundaryEffects) -> None:
        super().see(effects)
        for event in effects.events:
            assert isinstance(event, SourceHeld | SourceFinished)
            if isinstance(event, SourceHeld):
                assert self.prefill.held(event.handoff_id, event.attempt) is not None
                assert self.requests[event.request_id].max_tokens > 1

    def cancel_handoffs(self) -> None:
        for number in range(6):
            for attempt in (1, 2):
                self.apply(CancelSource(HandoffId(f"h{number}"), attempt))
                self.prefill.transfer_quiet(HandoffId(f"h{number}"), attempt)
                self.after_notes()


class DecodeMachine(SchedulerMachine):
    """receiving: reserved handoffs whose blocks may be written by the transport at any time."""

    def __init__(self) -> None:
        self.scheduler = self.decode = decode_scheduler(POOL, limits=LIMITS, max_model_len=32, max_reservations=3)
        self.receiving: dict[tuple[HandoffId, int], tuple[tuple[int, ...], Request]] = {}
        self.landed: set[tuple[HandoffId, int]] = set()
        super().__init__()

    @rule(number=handoffs, prompt=prompts, tokens=max_tokens, attempt=attempts)
    def reserve(self, number: int, prompt: tuple[int, ...], tokens: int, attempt: int) -> None:
        # One that ends with its first token is never handed over, so it is never activated here.
        request = self.request(number, prompt, max(2, tokens))
        if request.request_id not in self.live:
            self.requests[request.request_id] = request
        self.live_if_accepted(request, ReserveDestination(HandoffId(f"h{number}"), request, attempt))

    def live_if_accepted(self, request: Request, command: ReserveDestination) -> None:
        known = request.request_id in self.live
        self.live.add(request.request_id)
        if self.apply(command) is None:
            if not known:
                self.live.discard(request.request_id)
        else:
            assert not known

    def see(self, effects: BoundaryEffects) -> None:
        super().see(effects)
        for event in effects.events:
            assert isinstance(event, DestinationReserved | DestinationFinished)
            if isinstance(event, DestinationFinished):
                continue
            reserved = self.decode.reserved(event.handoff_id, event.attempt)
            assert reserved is not None
            assert event.missing_blocks == event.prompt_blocks - reserved.cached_blocks
            key = event.handoff_id, event.attempt
            self.decode.transfer_started(*key)
            self.receiving[key] = reserved.blocks[reserved.cached_blocks :], self.requests[event.request_id]

    @rule(number=handoffs, attempt=attempts)
    def bytes_come(self, number: int, attempt: int) -> None:
        """Part of a transfer: whatever owns these blocks now will see them written."""
        for blocks, _ in [self.receiving.get((HandoffId(f"h{number}"), attempt), ((), None))]:
            size = self.device.facts().block_bytes
            for block in blocks:
                self.device.pool[block * size : (block + 1) * size] = 0x77

    @rule(number=handoffs, attempt=attempts)
    def land(self, number: int, attempt: int) -> None:
        key = HandoffId(f"h{number}"), attempt
        if key not in self.receiving:
            return
        blocks, request = self.receiving.pop(key)
        source = Stepper(prefill_scheduler(8, max_model_len=32))
        source.scheduler.apply(Submit(Request(RequestId("s"), request.prompt, 1)))
        source.run()
        prompt_blocks = range(-(-len(request.prompt) // BLOCK_SIZE))
        copy_blocks(source.device, prompt_blocks[len(prompt_blocks) - len(blocks) :], self.device, blocks)
        if self.decode.landed(*key, source.tokens["s"][0]):
            self.landed.add(key)
        self.after_notes()

    @rule(number=handoffs, attempt=attempts)
    def transfer_breaks(self, number: int, attempt: int) -> None:
        key = HandoffId(f"h{number}"), attempt
        if self.receiving.pop(key, None) is not None:
            self.decode.transfer_quiet(*key)
            self.after_notes()

    @rule(number=handoffs, attempt=attempts)
    def activate(self, number: int, attempt: int) -> None:
        key = HandoffId(f"h{number}"), attempt
        effects = self.apply(ActivateDestination(*key))
        assert effects is not None
        assert isinstance(effects.result, Applied) == (key in self.landed)
        self.landed.discard(key)

    @rule(number=handoffs, attempt=attempts)
    def cancel_destination(self, number: int, attempt: int) -> None:
        key = HandoffId(f"h{number}"), attempt
        self.apply(CancelDestination(*key))
        self.landed.discard(key)

    def cancel_handoffs(self) -> None:
        # A cancel may let the next one in line reserve, which is then cancelled in its turn.
        for _ in range(2):
            for number in range(6):
                for attempt in (1, 2):
                    key = HandoffId(f"h{number}"), attempt
                    self.apply(CancelDestination(*key))
                    self.receiving.pop(key, None)
                    self.decode.transfer_quiet(*key)
                    self.after_notes()


TestPrefillScheduler = PrefillMachine.TestCase
TestPrefillScheduler.settings = deterministic(max_examples=80, steps=40)
TestDecodeScheduler = DecodeMachine.TestCase
TestDecodeScheduler.settings = deterministic(max_examples=80, steps=40)
