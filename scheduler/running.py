"""The running set: sequences that take part in steps, and what a settled step does to them.

decoding    all KV but the last token's is computed: one token a step
prefilling  more than one token has no KV yet: chunks under the token budget
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.errors import InvariantBroken
from scheduler.events import Outputs
from scheduler.kv import KvAccounting
from scheduler.request import FinishReason
from scheduler.sequence import Sequence, SequenceState


@dataclass(slots=True)
class Settled:
    """What a step brought. left: sequences that leave the batch, and why their request ended if it did.

    first: those that got their first token. doomed: those that were out of the batch before their step was settled;
    they have no output, and nothing of theirs is in flight any more.
    """

    outputs: Outputs = field(default_factory=Outputs)
    left: list[tuple[Sequence, FinishReason | None]] = field(default_factory=list)
    first: list[Sequence] = field(default_factory=list)
    doomed: list[Sequence] = field(default_factory=list)


class RunningSet:
    """short: decoding sequences without a block for their next token."""

    def __init__(self, kv: KvAccounting) -> None:
        self.kv = kv
        self.decoding: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        self.short: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decoding
        yield from self.prefilling

    def add(self, sequence: Sequence) -> None:
        """A sequence with blocks for all its known tokens."""
        sequence.state = SequenceState.RUNNING
        sequence.end = sequence.start
        if sequence.pending > 1:
            self.prefilling[sequence] = None
            return
        self.decoding[sequence] = None
        sequence.end = len(sequence.known)
        sequence.draw = sequence.next_draw()
        sequence.update_check_at(self.kv.block_size)
        if len(sequence.known) > len(sequence.blocks) * self.kv.block_size:
            raise InvariantBroken(f"{len(sequence.blocks)} blocks don't cover its next token", sequence.request_id)

    def remove(self, sequence: Sequence) -> None:
        (self.decoding if sequence in self.decoding else self.prefilling).pop(sequence)

    def choose_chunks(self, budget: int) -> list[Sequence]:
        """Prompt chunks of the next step, in order of admission, as far as the token budget goes."""
        chunks: list[Sequence] = []
        for sequence in self.prefilling:
            if budget == 0:
                break
            sequence.end = self.kv.chunk_end(sequence, sequence.start + min(sequence.pending, budget))
            budget -= sequence.count
            sequence.draw = sequence.next_draw() if sequence.end == len(sequence.known) else None
            chunks.append(sequence)
        return chunks

    def settle_decodes(self, decodes: list[Sequence], tokens: tuple[int | None, ...], settled: Settled) -> None:
        """The hot loop: what happens to every sequence at every step stands here, all else in `_settle_special`."""
        outputs = settled.outputs
        add_id, add_index, add_token = outputs.request_ids.append, outputs.indices.append, outputs.tokens.append
        if None in tokens:
            raise InvariantBroken("a decode row brought no token")
        for sequence, token in zip(decodes, tokens, strict=True):
            known = sequence.known
            length = sequence.end
            if length + 1 >= sequence.check_at or token in sequence.stops:
                self._settle_special(sequence, token, settled)  # type: ignore[arg-type]
                continue
            known.append(token)  # type: ignore[arg-type]
            sequence.start = length
            sequence.end = length + 1
            add_id(sequence.request_id)
            add_index(length - sequence.prompt_tokens)
            add_token(token)

    def _settle_special(self, sequence: Sequence, token: int, settled: Settled) -> None:
        if sequence.state is not SequenceState.RUNNING:
            settled.doomed.append(sequence)
            return
        sequence.start = sequence.end
        self.kv.publish(sequence)
        self._append(sequence, token, settled)

    def settle_chunk(self, sequence: Sequence, token: int | None, settled: Settled) -> None:
        if sequence.state is not SequenceState.RUNNING:
            settled.doomed.append(sequence)
            return
        if (token is None) != (sequence.draw is None):
            raise InvariantBroken("a token without a draw, or a draw without a token", sequence.request_id)
        sequence.start = sequence.end
        self.kv.publish(sequence)
        if token is not None:
            del self.prefilling[sequence]
            self.decoding[sequence] = None
            self._append(sequence, token, settled)

    def _append(self, sequence: Sequence, token: int, settled: Settled) -> None:
        """Book a drawn token and find out what comes next for its sequence."""
        sequence.known.append(token)
        outputs, row = settled.outputs, len(settled.outputs)
        outputs.request_ids.append(sequence.request_id)
        outputs.indices.append(sequence.outputs - 1)
        outputs.tokens.append(token)
        if sequence.outputs == 1:
            outputs.cached[row] = sequence.cached
            settled.first.append(sequence)
        finish = sequence.finish_with(token)
        if finish is not None:
            outputs.finishes[row] = finish
        if finish is not None or sequence.outputs >= sequence.output_limit:
            del self.decoding[sequence]
            self._leave(sequence, finish, settled)
            return
        sequence.end = len(sequence.known)
        if sequence.draw is None or sequence.draw.suppress:
            sequence.draw = sequence.next_draw()
        sequence.update_check_at(self.kv.block_size)
        if not self.kv.extend(sequence):
            self.short.append(sequence)

    def abandon(self, sequence: Sequence, settled: Settled) -> None:
        """The step of this sequence failed."""
        if sequence.state is not SequenceState.RUNNING:
            settled.doomed.append(sequence)
            return
        self.remove(sequence)
        self._leave(sequence, FinishReason.ERROR, settled)

    @staticmethod
    def _leave(sequence: Sequence, finish: FinishReason | None, settled: Settled) -> None:
        sequence.state = SequenceState.PARKED
        # A step of it that was launched ahead must not be booked.
        sequence.check_at = 0
        settled.left.append((sequence, finish))

    def check(self) -> None:
        """Prove that each sequence is where its state says. Raises InvariantBroken."""
        for sequence in self:
            if sequence.state is not SequenceState.RUNNING:
                raise InvariantBroken(f"it is {sequence.state.value} in the running set", sequence.request_id)
