"""A UCX worker of one's own, which says to a node's transport whatever a test wants."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from handoff.transports.ucx_env import prepare_ucx
from handoff.transports.ucx_seal import NONCE_BYTES, ClusterKey, Opener, Sealer
from handoff.transports.ucx_wire import (
    FRAME_BIT,
    HELLO_TAG,
    IDENTITY_BYTES,
    Address,
    Hello,
    Pairing,
    message_tag,
)

TIMEOUT_S = 10.0
NUMBER = 77


class RawPeer:
    """Speaks to the transport at `address`. secret: what it claims to know; identity: what it claims to be."""

    def __init__(self, address: bytes, secret: bytes, identity: bytes = b"raw peer") -> None:
        prepare_ucx()
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        assert len(identity) == IDENTITY_BYTES
        self._ucx, self._array = ucx, Array
        self._worker = ucx.UCXWorker(ucx.UCXContext())
        self.remote = Address.unpack(address)
        remote = ucx.UCXAddress.create_from_buffer(self.remote.worker)
        self._endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        self.identity, self.key = identity, ClusterKey(secret)
        self.address = Address(identity, b"elsewhere".ljust(16), self._worker.address.tobytes()).pack()
        self.heard: list[Hello] = []
        self.hellos_sent: list[bytes] = []
        self.seals: tuple[Sealer, Opener] | None = None
        self.pairing = self.fresh_pairing(NUMBER)
        self._sent: list[tuple[Any, Any]] = []

    def fresh_pairing(self, number: int) -> Pairing:
        self.pairing = Pairing(number, bytes([number % 256]) * NONCE_BYTES)
        return self.pairing

    def send(self, frame: bytes | Any, tag: int) -> None:
        buffer = self._array(frame)
        self._sent.append((self._endpoint.tag_send(buffer, self._ucx.UCXXTag(tag)), buffer))
        self.progress_for(0.01)

    def send_sealed(self, content: bytes) -> tuple[bytes, int]:
        """Returns what went over the wire, with its tag."""
        assert self.seals is not None
        assert self.pairing.peer_number is not None
        tag = message_tag(self.pairing.peer_number)
        frame = self.seals[0].seal(tag, content)
        self.send(frame, tag)
        return frame, tag

    def say_hello(self, answered: Hello | None) -> bytes:
        seen, echo = (answered.number, answered.nonce) if answered else (0, bytes(NONCE_BYTES))
        hello = Hello(self.identity, self.remote.identity, self.pairing.number, seen, self.pairing.nonce, echo)
        frame = hello.pack(self.key)
        self.hellos_sent.append(frame)
        self.send(frame, HELLO_TAG)
        return frame

    def shake_hands(self) -> None:
        """Open a connection as an honest peer does; the node must have connected to us."""
        self.say_hello(None)
        self.progress_until(lambda: any(hello.seen == self.pairing.number for hello in self.heard))
        hello = next(hello for hello in self.heard if hello.seen == self.pairing.number)
        self.pairing.heed(hello)
        self.say_hello(hello)
        self.seals = self.pairing.seals(self.key, self.identity, self.remote.identity)

    def progress_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            self._progress()

    def progress_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._progress()

    def _progress(self) -> None:
        self._worker.progress()
        tag, mask = self._ucx.UCXXTag(FRAME_BIT), self._ucx.UCXXTagMask(FRAME_BIT)
        while (probe := self._worker.tag_probe(tag, mask)).matched:
            buffer = np.empty(probe.length, np.uint8)
            exactly = self._ucx.UCXXTagMask((1 << 64) - 1)
            request = self._worker.tag_recv(self._array(buffer), probe.sender_tag, exactly)
            while not request.completed:
                self._worker.progress()
            if probe.sender_tag.value == HELLO_TAG:
                self.heard.append(Hello.unpack(buffer.tobytes()))
        time.sleep(0.0005)

    def close(self) -> None:
        self._sent.clear()
        self._endpoint.close_blocking(1_000_000_000, 2)
        del self._endpoint, self._worker
