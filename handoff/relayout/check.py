"""Which two nodes may hand KV to each other with a re-layout in between.

A refusal is of the peer: the node itself stays in service.
"""

from handoff.compatibility import LAYOUT, Compatibility, IncompatiblePeer
from handoff.relayout.convert import EXACT
from handoff.relayout.shape import BadShape, KvShape

MAY_DIFFER = ("dtype", "block_size", "ranks")


def check(source: Compatibility, destination: Compatibility, peer: str) -> None:
    """Whether `source` may send to `destination`. peer: the one of the two that isn't this node.

    Raises IncompatiblePeer, naming every field that is in the way.
    """
    differing = source.differing(destination)
    if not differing:
        return
    reasons = [reason for name in differing if (reason := _objection(source, destination, name))]
    reasons = reasons or _unknown(source, "source") + _unknown(destination, "destination")
    if reasons:
        raise IncompatiblePeer.because(peer, reasons)


def check_either_way(mine: Compatibility, theirs: Compatibility, peer: str) -> None:
    """Whether a link between two nodes is of any use: at least one may send to the other. Raises IncompatiblePeer."""
    try:
        check(theirs, mine, peer)
    except IncompatiblePeer:
        check(mine, theirs, peer)


def _objection(source: Compatibility, destination: Compatibility, name: str) -> str:
    """Why this field may not differ as it does; empty if it may."""
    here, there = getattr(source, name), getattr(destination, name)
    unequal = f"{name} is {here} at the source and {there} at the destination"
    if name not in MAY_DIFFER:
        return unequal
    if name == "dtype" and (here, there) not in EXACT:
        return f"{unequal}, and only {' and '.join(' to '.join(pair) for pair in EXACT)} is exact"
    if name != "block_size" and source.slot_bytes:
        return f"{unequal}, and slot_bytes is {source.slot_bytes}: records of slots are never re-laid out"
    return ""


def _unknown(side: Compatibility, where: str) -> list[str]:
    if side.layout != LAYOUT:
        return [f"layout is {side.layout} at the {where}, and only {LAYOUT} is re-laid out"]
    try:
        KvShape.of(side)
    except BadShape as error:
        return [f"at the {where} {error}"]
    return []
