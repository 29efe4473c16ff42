"""What a run has shown, computed from what was noted. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moved:
    """One handoff that landed. Times in seconds of the machine's monotonic clock.

    sampled_at: the source had its first token. landed_at: the destination could run. seconds, exposed_s: see Landed.
    """

    bytes_moved: int
    lane: str
    sampled_at: float
    landed_at: float
    seconds: float
    exposed_s: float

    @property
    def handed_s(self) -> float:
        """From the first token to a runnable destination: all that a handoff adds, as long as nothing overlaps."""
        return self.landed_at - self.sampled_at


@dataclass(frozen=True, slots=True)
class Figures:
    """moving: bytes over the seconds in which any were on their way. wall: over all seconds. Rates in GB/s.

    damaged: checked handoffs whose bytes were others. lost_blocks: still owned on a node after the end.
    """

    handoffs: int
    failed: int
    checked: int
    damaged: int
    lost_blocks: int
    lane: str
    moving_gb_per_s: float
    wall_gb_per_s: float
    exposed_p50_ms: float
    exposed_p99_ms: float
    handed_p50_ms: float
    handed_p99_ms: float

    @property
    def is_sound(self) -> bool:
        return not (self.failed or self.damaged or self.lost_blocks) and self.handoffs > 0


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least this share of them doesn't exceed; 0 of none."""
    ranked = sorted(values)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)] if ranked else 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in any of the (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def figures(
    moved: Sequence[Moved], wall_s: float, *, failed: int, checked: int, damaged: int, lost_blocks: int
) -> Figures:
    sent = sum(one.bytes_moved for one in moved) / 1e9
    moving_s = covered((one.landed_at - one.seconds, one.landed_at) for one in moved)
    exposed = [one.exposed_s * 1e3 for one in moved]
    handed = [one.handed_s * 1e3 for one in moved]
    return Figures(
        handoffs=len(moved),
        failed=failed,
        checked=checked,
        damaged=damaged,
        lost_blocks=lost_blocks,
        lane=", ".join(sorted({one.lane for one in moved})),
        moving_gb_per_s=sent / moving_s if moving_s else 0.0,
        wall_gb_per_s=sent / wall_s if wall_s else 0.0,
        exposed_p50_ms=percentile(exposed, 0.5),
        exposed_p99_ms=percentile(exposed, 0.99),
        handed_p50_ms=percentile(handed, 0.5),
        handed_p99_ms=percentile(handed, 0.99),
    )
