"""The transfers of lost peers, until UCX has let go of their memory. On the transport's thread, which goes on with
its other peers meanwhile.

Closing a peer's endpoint ends its transfers, mostly at once. UCX has been seen to keep a send open for ever (to a dead
peer's full queue); but a closed endpoint moves no byte of it any more, so it is let go of after a while. A receive is
another matter: whoever lives may still write there, so it is waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from handoff.transports.ucx_transfer import Send, Transfer

log = structlog.get_logger()

SEND_QUIET_S = 0.5
"""How long UCX may take to end the sends to a lost peer before they are let go of."""
QUIET_S = 2.0
"""How long it may take to end the receives before that is worth an error in the log."""


@dataclass(slots=True)
class _Lost:
    peer: str
    since: float
    transfers: list[Transfer]
    reported: bool = False


class LostTransfers:
    """Each ends once, in `settle` or in what `release` returns."""

    def __init__(self) -> None:
        self._lost: list[_Lost] = []
        self._let_go: list[Transfer] = []

    def __bool__(self) -> bool:
        return bool(self._lost)

    def add(self, peer: str, transfers: Sequence[Transfer], now: float) -> None:
        """Take transfers that were abandoned; those that have ended are finished at once."""
        lost = _Lost(peer, now, list(transfers))
        _finish_quiet(lost)
        if lost.transfers:
            self._lost.append(lost)

    def settle(self, now: float) -> None:
        """Finish what UCX has let go of by now."""
        for lost in self._lost:
            _finish_quiet(lost)
            if now - lost.since >= SEND_QUIET_S:
                self._let_go_of_sends(lost)
            if lost.transfers and now - lost.since >= QUIET_S and not lost.reported:
                lost.reported = True
                log.error("ucx still holds memory of a lost peer", peer=lost.peer, transfers=len(lost.transfers))
        self._lost = [lost for lost in self._lost if lost.transfers]

    def release(self) -> list[Transfer]:
        """Let go of everything; returns what is to be finished when UCX is gone."""
        remaining = [transfer for lost in self._lost for transfer in lost.transfers]
        for transfer in (*remaining, *self._let_go):
            transfer.release()
        self._lost, self._let_go = [], []
        return remaining

    def _let_go_of_sends(self, lost: _Lost) -> None:
        sends = [transfer for transfer in lost.transfers if isinstance(transfer, Send)]
        if not sends:
            return
        log.warning("ucx never ended the sends to a lost peer", peer=lost.peer, transfers=len(sends))
        lost.transfers = [transfer for transfer in lost.transfers if not isinstance(transfer, Send)]
        # Their requests are kept: UCX owns what they point to.
        self._let_go += sends
        for send in sends:
            send.finish()


def _finish_quiet(lost: _Lost) -> None:
    for transfer in lost.transfers:
        transfer.advance()
    quiet = [transfer for transfer in lost.transfers if transfer.quiet]
    lost.transfers = [transfer for transfer in lost.transfers if not transfer.quiet]
    for transfer in quiet:
        transfer.finish()
