"""How KV gets from one node's pool into another's."""

from handoff.compatibility import Compatibility, IncompatiblePeer
from handoff.relayout.check import check
from handoff.relayout.routes import Route, routes
from handoff.relayout.shape import KvShape


def staged_route(source: Compatibility, destination: Compatibility, peer: str) -> Route | None:
    """The route of a pair of one-rank nodes; None if blocks go straight from pool to pool. peer: see `check`.

    Raises IncompatiblePeer.
    """
    check(source, destination, peer)
    require_equal_ranks(source, destination, peer)
    if not source.differing(destination):
        return None
    return routes(KvShape.of(source), KvShape.of(destination))[0, 0]


def require_equal_ranks(mine: Compatibility, theirs: Compatibility, peer: str) -> None:
    """Raises IncompatiblePeer: one route would bring a part of the heads only, and nothing joins several yet."""
    if mine.ranks != theirs.ranks:
        reason = f"ranks is {mine.ranks} on one side and {theirs.ranks} on the other: start both with the same degree"
        raise IncompatiblePeer.because(peer, [reason])
