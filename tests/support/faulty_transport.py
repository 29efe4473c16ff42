"""A memory transport that goes wrong on demand, or counts what is asked of it."""

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from handoff.transports.base import Done, OnMessage, Piece, TransferError
from handoff.transports.memory import MemoryFabric, MemoryTransport


class Faults:
    """What the transports of one cluster share.

    fail_sends: ordinals of posted sends (from 0) whose bytes never come: both sides are told so.
    early: receives are told to be done before any byte has come.
    depth: more sends at a time than this fail, like those of a card whose queue is full.
    sends: how many were posted. most: at a time, if no peer is lost. pools: what was registered, in order.
    """

    def __init__(self, fail_sends: Collection[int] = (), depth: int | None = None) -> None:
        self.fail_sends = set(fail_sends)
        self.depth = depth
        self.early = False
        self.sends = self.under_way = self.most = 0
        self.pools: list[object] = []
        self._lock = threading.Lock()

    def transport(self, fabric: MemoryFabric) -> MemoryTransport:
        return _FaultyTransport(fabric, self)

    def begin_send(self) -> bool:
        """False if it must fail."""
        with self._lock:
            ordinal = self.sends
            self.sends += 1
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return ordinal not in self.fail_sends and (self.depth is None or self.under_way <= self.depth)

    def end_send(self) -> None:
        with self._lock:
            self.under_way -= 1


class _FaultyTransport(MemoryTransport):
    def __init__(self, fabric: MemoryFabric, faults: Faults) -> None:
        super().__init__(fabric)
        self._faults = faults

    def start(self, node: str, pool: Any, on_message: OnMessage) -> None:
        self._faults.pools.append(pool)
        super().start(node, pool, on_message)

    def post_send(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        if not self._faults.begin_send():
            # Another length than was agreed on: the fabric ends both sides, as every transport must.
            pieces = [*pieces[:-1], replace(pieces[-1], length=pieces[-1].length - 1)]
        super().post_send(peer, channel, pieces, done)

    def _end_both(self, peer: Any, channel: int, error: TransferError | None) -> None:
        # Before either side hears of it: a card has room again when the bytes are out.
        self._faults.end_send()
        super()._end_both(peer, channel, error)

    def post_receive(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        if not self._faults.early:
            super().post_receive(peer, channel, pieces, done)
            return
        super().post_receive(peer, channel, pieces, lambda error: None)
        self.call_back(done, None)
