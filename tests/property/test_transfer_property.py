"""Transfers in every order of events: what lands is right, each side ends once, and nothing stays posted.

The source's prefill loses its blocks now and then, and another sequence overwrites them while they are read. Its last
chunk may be told of layer by layer, also late, and may fail.
"""

import random

import numpy as np
import pytest
from exchange_pair import BLOCK_BYTES, LAYERS, D, H, P, Pair, held, reserved

from handoff.transfer_ends import Landed, Sent
from handoff.transfer_out import Progress
from scheduler.ids import RequestId

PROMPT_BLOCKS = 6
BLOCK_SIZE = 4
SEEDS = 400


class Run:
    """One transfer. content[i]: what block i of the prompt holds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pair = Pair()
        self.pool = self.pair.source.transport.pool
        self.content = self.random.randbytes(PROMPT_BLOCKS * BLOCK_BYTES)
        self.blocks: list[int] = []
        self.final = self.generation = 0
        self.layers = 0
        """Of the blocks from `final` on, in the step that runs; other calls come when none runs."""
        self.layered = False
        self.news: tuple[int, int] | None = None
        """Layers and generation that may be told late."""
        self.completed = False
        self.into = self.random.sample(range(60), PROMPT_BLOCKS)
        self.cached = self.random.choice([0, 0, 1, 3, PROMPT_BLOCKS])
        for number in range(self.cached):
            self._write(self.pair.destination.transport.pool, self.into[number], number)
        prompt = PROMPT_BLOCKS * BLOCK_SIZE
        self.pair.destination.exchange.expect(H, 1, reserved(*self.into, cached=self.cached, prompt_tokens=prompt))
        self.pair.source.exchange.offer(D, H, 1, RequestId("r"), prompt)

    def _write(self, pool: "np.ndarray[tuple[int], np.dtype[np.uint8]]", block: int, number: int) -> None:
        content = self.content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = np.frombuffer(content, np.uint8)

    def prefill(self) -> None:
        """A chunk more; with all blocks final, the hold."""
        if self.completed:
            return
        if self.layers:
            self._compute_layers(LAYERS)
            self.final, self.layers = PROMPT_BLOCKS, 0
        if not self.blocks:
            self.blocks = self.random.sample(range(60), PROMPT_BLOCKS)
        if self.final == PROMPT_BLOCKS:
            self.completed = True
            source = held(*self.blocks, generation=self.generation)
            self.pair.source.exchange.complete(H, 1, source)
            return
        end = min(PROMPT_BLOCKS, self.final + self.random.randint(1, 3))
        for number in range(self.final, end):
            self._write(self.pool, self.blocks[number], number)
        self.final = end
        self.report()

    def layer(self) -> None:
        """A layer more of all blocks that are left."""
        if not self.blocks or self.completed or self.final == PROMPT_BLOCKS or self.layers == LAYERS - 1:
            return
        if not self.layers:
            self.report()
        self._compute_layers(self.layers + 1)
        self.news = self.layers, self.generation
        if self.random.random() < 0.7:
            self.tell()

    def tell(self) -> None:
        if self.news is not None:
            self.layered = True
            self.pair.source.exchange.layers_final(H, 1, *self.news)

    def _compute_layers(self, layers: int) -> None:
        size = BLOCK_BYTES // LAYERS
        for number in range(self.final, PROMPT_BLOCKS):
            for layer in range(self.layers, layers):
                start = number * BLOCK_BYTES + layer * size
                place = self.blocks[number] * BLOCK_BYTES + layer * size
                self.pool[place : place + size] = np.frombuffer(self.content[start : start + size], np.uint8)
        self.layers = layers

    def fail(self) -> None:
        """The step that runs fails: its request ends, and its blocks go to another."""
        if self.layers and not self.completed:
            self.pair.source.exchange.cease(H, 1, "the request ended at its source")
            self.completed = True
            self._overwrite()

    def lose(self) -> None:
        """The blocks go to another sequence, which writes them."""
        if self.completed or not self.blocks:
            return
        self._overwrite()
        self.blocks, self.final, self.layers = [], 0, 0
        self.generation += 1
        if self.random.random() < 0.5:  # otherwise it is seen only when it has blocks again
            self.report()

    def _overwrite(self) -> None:
        for block in self.blocks:
            place = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            self.pool[place] = np.frombuffer(self.random.randbytes(BLOCK_BYTES), np.uint8)

    def report(self) -> None:
        self.pair.source.exchange.advance(H, 1, Progress(tuple(self.blocks), self.final, self.generation))

    def move_one(self) -> None:
        """The bytes of one segment, any of those that both sides have posted."""
        out, into = self.pair.source.transport, self.pair.destination.transport
        receives = {operation[1]: operation for operation in into.receives}
        ready = [operation for operation in out.sends if operation[1] in receives]
        if not ready:
            return
        send = self.random.choice(ready)
        receive = receives[send[1]]
        out.sends.remove(send)
        into.receives.remove(receive)
        self.pair._copy(send[2], receive[2])
        for done in self.random.sample([send[3], receive[3]], 2):
            done(None)

    def deliver_one(self) -> None:
        sides = [(self.pair.source, P, self.pair.destination), (self.pair.destination, D, self.pair.source)]
        ready = [side for side in sides if side[0].transport.frames]
        if ready:
            origin, name, target = self.random.choice(ready)
            target.transport.on_message(name, origin.transport.frames.popleft()[1])

    def call_off(self) -> None:
        self.random.choice(
            [
                lambda: self.pair.source.exchange.cease(H, 1, "cancelled"),
                lambda: self.pair.destination.exchange.withdraw(H, 1),
            ]
        )()

    def drain(self) -> None:
        """Everything that is under way arrives."""
        pair = self.pair
        while pair.source.transport.frames or pair.destination.transport.frames or self._is_moving():
            self.deliver_one()
            self.move_one()

    def _is_moving(self) -> bool:
        channels = {operation[1] for operation in self.pair.source.transport.sends}
        return any(operation[1] in channels for operation in self.pair.destination.transport.receives)


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_what_lands_is_what_was_computed(first: int) -> None:
    landings = layered = 0
    for seed in range(first, first + 100):
        run = Run(seed)
        steps = [run.prefill] * 3 + [run.deliver_one] * 4 + [run.move_one] * 4 + [run.lose]
        if seed % 2:
            steps += [run.layer] * 4 + [run.tell]
        if seed % 3 == 0:
            steps += [run.call_off, run.fail]
        for _ in range(run.random.randint(1, 80)):
            run.random.choice(steps)()
        while not run.completed:
            run.prefill()
        run.drain()
        source, destination = run.pair.ends
        assert [len(source), len(destination)] == [1, 1], (seed, run.pair.ends)
        assert not run.pair.source.transport.sends, seed
        assert not run.pair.destination.transport.receives, seed
        if isinstance(destination[0], Landed):
            landings += 1
            layered += run.layered
            assert isinstance(source[0], Sent)
            pool = run.pair.destination.transport.pool
            got = b"".join(pool[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES].tobytes() for b in run.into)
            assert got == run.content, seed
        elif seed % 3:
            # Only bytes that were overwritten while they were read may break it.
            assert run.generation, (seed, run.pair.ends)
    assert landings > 40
    assert layered > 15
