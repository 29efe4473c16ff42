"""Segments of a source whose blocks are not like ours: they land in the staging area and are re-laid out from there.

waiting for a half of the area --> bytes on their way --> copied into the reserved blocks, on a thread of its own
"""

from concurrent.futures import ThreadPoolExecutor
from threading import RLock

from handoff.arrival import Arrival
from handoff.compatibility import IncompatiblePeer
from handoff.pool_arrays import as_array, wait_for_copies
from handoff.relayout.copies import unpack
from handoff.relayout.pieces import pieces_of_pool
from handoff.relayout.routes import Route
from handoff.relayout.staging import Staging
from handoff.relayout.windows import windows
from handoff.transports.base import TransferError
from handoff.wiring import Wiring


class StagedReceiver:
    """Called with `lock` held; what the transport and the copying thread call takes it."""

    def __init__(self, wiring: Wiring, lock: RLock) -> None:
        self._wiring = wiring
        self._lock = lock
        self._staging = Staging(wiring.layout.first_staging, wiring.layout.staging_bytes)
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="relayout")

    def close(self) -> None:
        """Copies under way end first; each takes milliseconds."""
        self._copies.shutdown(wait=True)

    def limit(self, route: Route) -> int:
        """How many blocks of the source a segment may have. Raises IncompatiblePeer."""
        blocks = self._staging.half_bytes // route.staged_block_bytes
        if blocks:
            return blocks
        raise IncompatiblePeer(
            f"the source's KV must be re-laid out here, and half of this node's staging area of"
            f" {self._wiring.layout.staging_bytes} bytes has no room for a block of {route.staged_block_bytes}: raise"
            " limits.staging_mib, or give both pools the same block_size and dtype"
        )

    def receive(self, arrival: Arrival, route: Route) -> None:
        """Ends with `arrival.done`."""

        def post(area: int) -> None:
            _, pieces = pieces_of_pool(route, arrival.segment.blocks, area)
            arrival.post(self._wiring, pieces, lambda error: self._on_landed(arrival, route, area, error))

        self._staging.acquire(post)

    def _on_landed(self, arrival: Arrival, route: Route, area: int, error: TransferError | None) -> None:
        if error is None:
            try:
                self._copies.submit(self._copy, arrival, route, area)
                return
            except RuntimeError:
                error = TransferError("the node is stopping")
        self._end(arrival, area, error)

    def _copy(self, arrival: Arrival, route: Route, area: int) -> None:
        error: TransferError | None
        try:
            error = self._unpack(arrival, route, area)
        except Exception as failure:
            error = TransferError(f"the KV could not be re-laid out: {type(failure).__name__}: {failure}")
        self._end(arrival, area, error)

    def _unpack(self, arrival: Arrival, route: Route, area: int) -> TransferError | None:
        count = len(arrival.segment.blocks)
        wrong = arrival.verify(self._wiring, route.staged_block_bytes, range(count), area)
        if wrong is not None or not count:
            return wrong
        incoming, source, own = arrival.incoming, route.source, route.destination
        assert incoming.offer is not None
        first = arrival.segment.first_block
        start = max(first * source.block_size, incoming.expected.cached_blocks * own.block_size)
        stop = min((first + count) * source.block_size, incoming.offer.prompt_tokens)
        (window,) = windows(source.block_size, own.block_size, range(start, stop), count)
        xp, memory = as_array(self._wiring.pool)
        staged = memory[area : area + count * route.staged_block_bytes]
        unpack(staged, route, window, incoming.expected.blocks, memory[: self._wiring.layout.blocks_bytes], xp)
        wait_for_copies(xp)
        return None

    def _end(self, arrival: Arrival, area: int, error: TransferError | None) -> None:
        arrival.done(error)
        with self._lock:
            self._staging.release(area)
