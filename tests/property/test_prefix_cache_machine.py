"""KV accounting and the prefix cache against a model that knows for each block which tokens it holds (cache_model.py).

Prompts share prefixes, adapters and salts. Every admission must find exactly what is there, and every hit be right.
"""

import sys
from typing import TypeAlias

from cache_model import CacheModel, Namespace, Owner
from determinism import deterministic, steps_taken
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.events import BlocksStored
from scheduler.ids import RequestId
from scheduler.kv import KvAccounting
from scheduler.request import Request
from scheduler.sequence import Sequence

STEM = [1] * 9 + [2] * 15
namespaces = st.sampled_from([(None, None)] * 4 + [(None, "s"), ("a", None), ("a", "s")])
Prompt: TypeAlias = tuple[int, int, list[int]]
"""Whose tokens it begins with, how many of them are left out at the end, and its own tokens."""
prompts: st.SearchStrategy[Prompt] = st.tuples(
    st.integers(0, 20), st.sampled_from([0, 0, 0, 1, 1, 2, 4, 7]), st.sampled_from([[], [], [0], [1], [2, 0]])
)
picks = st.integers(0, 20)


class PrefixCacheMachine(RuleBasedStateMachine):
    """sequences: the real ones, by the model's owners. history: what prompts may begin with, as conversations do.

    name_of: what each hash has turned out to name.
    """

    @initialize(
        total=st.integers(4, 18),
        block_size=st.sampled_from([1, 3, 4, 4, 5]),
        caching=st.sampled_from([True] * 6 + [False]),
        guaranteed=st.sampled_from([False] * 4 + [True]),
    )
    def start(self, total: int, block_size: int, caching: bool, guaranteed: bool) -> None:
        self.kv = KvAccounting(total, block_size, caching, guaranteed=guaranteed, kv_events=True)
        self.model = CacheModel(total, block_size, caching, guaranteed)
        self.sequences: dict[Owner, Sequence] = {}
        self.history = [STEM[:count] for count in (3, 4, 8, 9, 12, 20)]
        self.arrivals = self.kv_event_number = 0
        self.name_of: dict[bytes, tuple[object, ...]] = {}
        self.stored: set[bytes] = set()

    def owner(self, pick: int) -> Owner:
        return self.model.owners[pick % len(self.model.owners)]

    def tokens(self, prompt: Prompt) -> list[int]:
        pick, left_out, own = prompt
        begin = self.history[-1 - pick % len(self.history)]
        return [*begin[: len(begin) - left_out], *own] or [0]

    @rule(
        prompt=prompts,
        namespace=namespaces,
        outputs=st.integers(1, 9),
        sampled=st.integers(0, 9),
        keep=st.sampled_from([None, True, True, False]),
    )
    def serve(self, prompt: Prompt, namespace: Namespace, outputs: int, sampled: int, keep: bool | None) -> None:
        """From admission to release, or to some token if keep is None; others go until there is room."""
        self.make_ready()
        while (owner := self.admit(self.tokens(prompt), namespace, outputs)) is None and self.model.owners:
            self.give_back(self.model.owners[0], keep=True)
        if owner is None:
            return
        self.make_ready()
        for token in range(sampled + 1):
            self.advance(owner, len(owner.known))
            self.append(owner, token % 3)
        if keep is not None:
            self.give_back(owner, keep)

    @rule(
        prompt=prompts,
        namespace=namespaces,
        outputs=st.integers(1, 6),
        receives=st.sampled_from([False, False, True]),
        headroom=st.sampled_from([0, 0, 0, 1, 2]),
        reuse=st.sampled_from([True, True, True, True, False]),
    )
    def only_admit(
        self, prompt: Prompt, namespace: Namespace, outputs: int, receives: bool, headroom: int, reuse: bool
    ) -> None:
        self.admit(self.tokens(prompt), namespace, outputs, receives, headroom, reuse)

    def admit(
        self,
        prompt: list[int],
        namespace: Namespace,
        outputs: int,
        receives: bool = False,
        headroom: int = 0,
        reuse: bool = True,
    ) -> Owner | None:
        """receives: a transfer will fill the prompt's blocks, and one position more is wanted."""
        adapter, salt = namespace
        request = Request(RequestId(f"r{self.arrivals}"), tuple(prompt), outputs, adapter=adapter, cache_salt=salt)
        sequence = Sequence(request, self.arrivals, outputs)
        self.arrivals += 1
        positions, leave = (len(prompt) + 1, 0) if receives else (len(prompt), 1)
        model = self.model
        promised = max(model.blocks_for(len(prompt) + outputs - 1), model.blocks_for(positions))
        fits = not model.guaranteed or model.promised + promised <= model.pool.total
        found = model.find(namespace, prompt, positions, leave, headroom, reuse) if fits else None
        admitted = self.kv.admit(sequence, positions, leave=leave, headroom=headroom, reuse=reuse)
        assert admitted == (found is not None and found.fits)
        if not admitted:
            assert not sequence.blocks
            return None
        assert found is not None
        owner = model.admitted(namespace, list(prompt), found, sequence.blocks, promised if model.guaranteed else 0)
        self.sequences[owner] = sequence
        return owner

    @precondition(lambda self: self.model.copies)
    @rule(copied=st.sampled_from([True, True, False]))
    def settle_copies(self, copied: bool) -> None:
        told = [(copy.source, copy.target) for copy in self.kv.copies]
        assert told == [(source, target) for _, source, target in self.model.copies]
        self.kv.settle_copies(copied=copied)
        self.model.settle_copies(copied)

    def make_ready(self) -> None:
        if self.model.copies:
            self.settle_copies(copied=True)

    @precondition(lambda self: self.model.owners and not self.model.copies)
    @rule(pick=picks, most=st.integers(1, 9))
    def compute(self, pick: int, most: int) -> None:
        self.advance(self.owner(pick), most)

    def advance(self, owner: Owner, most: int) -> None:
        """Compute up to `most` tokens, as far as there are blocks."""
        sequence = self.sequences[owner]
        room = len(owner.blocks) * self.model.size
        count = min(most, len(owner.known) - owner.start, room - owner.start)
        self.model.compute(owner, count)
        sequence.start += count
        self.kv.publish(sequence)
        self.model.publish(owner)
        self.learn_names(owner)

    @precondition(lambda self: self.model.owners and not self.model.copies)
    @rule(pick=picks, token=st.integers(0, 2))
    def sample(self, pick: int, token: int) -> None:
        self.append(self.owner(pick), token)

    def append(self, owner: Owner, token: int) -> None:
        """A token is drawn once all known ones are computed, and its block must exist before the next step."""
        sequence = self.sequences[owner]
        if owner.start < len(owner.known) or len(owner.known) >= len(sequence.request.prompt) + sequence.output_limit:
            return
        owner.known.append(token)
        sequence.known.append(token)
        needed = self.model.blocks_for(len(owner.known)) > len(owner.blocks)
        assert self.kv.extend(sequence) == (not needed or self.model.pool.available > 0)
        self.model.grown(owner, sequence.blocks)

    @precondition(lambda self: self.model.owners and not self.model.copies)
    @rule(pick=picks, keep=st.sampled_from([True, True, False]))
    def release(self, pick: int, keep: bool) -> None:
        self.give_back(self.owner(pick), keep)

    def give_back(self, owner: Owner, keep: bool) -> None:
        sequence = self.sequences.pop(owner)
        self.history.append(owner.known[: self.model.size * 5])
        self.kv.release(sequence, keep=keep)
        self.model.release(owner, keep)
        assert not sequence.blocks

    @rule()
    def events_tell_what_can_be_found(self) -> None:
        for event in self.kv.take_events():
            self.kv_event_number += 1
            assert event.number == self.kv_event_number
            if not isinstance(event, BlocksStored):
                assert self.stored >= set(event.hashes)
                self.stored -= set(event.hashes)
                continue
            parent = event.parent
            for block_hash in event.hashes:
                self.require_parent(block_hash, parent)
                assert block_hash not in self.stored
                self.stored.add(block_hash)
                parent = block_hash
        names = {name for name in self.model.pool.name_of.values() if name[0] == "full"}  # type: ignore[index]
        assert {self.name_of[block_hash] for block_hash in self.stored} == names

    def require_parent(self, block_hash: bytes, parent: bytes | None) -> None:
        _, namespace, tokens = self.name_of[block_hash]
        before = tokens[: -self.model.size]  # type: ignore[index]
        assert self.name_of[parent] == ("full", namespace, before) if parent is not None else not before

    def learn_names(self, owner: Owner) -> None:
        """Equal hashes name equal tokens of equal namespaces."""
        for index, block_hash in enumerate(self.sequences[owner].chain):
            name = "full", owner.namespace, tuple(owner.known[: (index + 1) * self.model.size])
            assert self.name_of.setdefault(block_hash, name) == name

    @invariant()
    def equal_tokens_have_equal_hashes(self) -> None:
        assert len(set(self.name_of.values())) == len(self.name_of)

    @invariant()
    def the_accounting_is_as_the_model_says(self) -> None:
        steps_taken["prefix cache"] += 1
        kv, model = self.kv, self.model
        pins = [[copy.source] for copy in kv.copies]
        kv.pool.check([*(sequence.blocks for sequence in self.sequences.values()), *pins])
        for owner, sequence in self.sequences.items():
            assert (sequence.blocks, sequence.start, sequence.known) == (owner.blocks, owner.start, owner.known)
        model.require_right_content()
        assert (kv.pool.free, kv.pool.cached) == (len(model.pool.free), len(model.pool.idle))
        assert kv.pool.published == len(model.pool.name_of)
        assert (kv.committed, kv.lookups, kv.hits) == (model.promised, model.lookups, model.hits)

    def teardown(self) -> None:
        if not hasattr(self, "kv") or sys.exc_info()[0] is not None:
            return  # a rule has failed: that is what must be reported
        self.make_ready()
        while self.sequences:
            self.give_back(self.model.owners[0], keep=True)
            self.the_accounting_is_as_the_model_says()
        self.events_tell_what_can_be_found()
        assert self.kv.pool.available == self.kv.pool.total
        assert self.kv.committed == 0


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = deterministic(max_examples=120, steps=50)
