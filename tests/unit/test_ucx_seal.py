"""Proofs of the secret, seals of frames, and what is remembered of strangers; without UCX."""

import pytest

from handoff.transports.ucx_door import EARLY_HELLOS, STRANGERS, WARN_EVERY_S, EarlyHellos, Strangers
from handoff.transports.ucx_seal import SEAL_BYTES, ClusterKey, FramesMissing, NotAuthentic, Opener, Sealer
from handoff.transports.ucx_wire import NO_NONCE, Hello, Pairing, check_hello

A, B, C = b"identitA", b"identitB", b"identitC"
KEY, OTHER = ClusterKey(b"secret"), ClusterKey(b"another")
HELLO = Hello(A, B, 10, 20, b"a" * 16, b"b" * 16)
TAG = 1 << 63 | 5 << 32


def test_a_proof_holds_for_one_secret_and_one_hello() -> None:
    data = HELLO.pack(KEY)
    check_hello(data, KEY)
    for key in (OTHER, ClusterKey(b"")):
        with pytest.raises(NotAuthentic):
            check_hello(data, key)
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(NotAuthentic):
            check_hello(damaged, KEY)


def test_the_secret_is_not_shown() -> None:
    assert "secret" not in repr(KEY)


def opened_pair() -> tuple[Pairing, Pairing]:
    left, right = Pairing(10, b"a" * 16), Pairing(20, b"b" * 16)
    left.heed(Hello(B, A, 20, 10, right.nonce, left.nonce))
    right.heed(Hello(A, B, 10, 20, left.nonce, right.nonce))
    return left, right


def test_both_sides_of_a_connection_have_the_same_keys_one_a_direction() -> None:
    left, right = opened_pair()
    (to_right, from_right), (to_left, from_left) = left.seals(KEY, A, B), right.seals(KEY, B, A)
    assert from_left.open(TAG, memoryview(to_right.seal(TAG, b"hello"))) == b"hello"
    frame = to_left.seal(TAG, b"back")
    with pytest.raises(NotAuthentic):
        from_left.open(TAG, memoryview(frame))
    assert from_right.open(TAG, memoryview(frame)) == b"back"


@pytest.mark.parametrize("change", ["number", "nonce", "peer's nonce", "secret", "identity"])
def test_another_connection_has_another_key(change: str) -> None:
    left, right = opened_pair()
    sealer, _ = left.seals(KEY, A, B)
    other = Pairing(21 if change == "number" else 20, b"c" * 16 if change == "nonce" else b"b" * 16)
    nonce = b"d" * 16 if change == "peer's nonce" else left.nonce
    other.heed(Hello(A, B, 10, other.number, nonce, other.nonce))
    key = OTHER if change == "secret" else KEY
    _, opener = other.seals(key, B, C if change == "identity" else A)
    with pytest.raises(NotAuthentic):
        opener.open(TAG, memoryview(sealer.seal(TAG, b"hello")))
    assert right.is_open


def ends() -> tuple[Sealer, Opener]:
    return Sealer(b"k" * 32), Opener(b"k" * 32)


def test_a_frame_opens_once_and_only_as_what_it_was_sent() -> None:
    sealer, opener = ends()
    frame = sealer.seal(TAG, b"hello")
    with pytest.raises(NotAuthentic, match="seal is wrong"):
        opener.open(TAG | 1, memoryview(frame))
    assert opener.open(TAG, memoryview(frame)) == b"hello"
    with pytest.raises(NotAuthentic, match="came again"):
        opener.open(TAG, memoryview(frame))
    assert opener.open(TAG, memoryview(sealer.seal(TAG, b"next"))) == b"next"


def test_a_damaged_or_short_frame_is_dropped_and_the_next_one_opens() -> None:
    sealer, opener = ends()
    frame = sealer.seal(TAG, b"hello")
    for at in range(len(frame)):
        with pytest.raises(NotAuthentic):
            opener.open(TAG, memoryview(frame[:at] + bytes([frame[at] ^ 128]) + frame[at + 1 :]))
    for length in range(SEAL_BYTES + 1):
        with pytest.raises(NotAuthentic):
            opener.open(TAG, memoryview(frame[:length]))
    assert opener.open(TAG, memoryview(frame)) == b"hello"


def test_a_gap_is_told_apart() -> None:
    sealer, opener = ends()
    sealer.seal(TAG, b"lost")
    with pytest.raises(FramesMissing, match="frame 2 came after 0"):
        opener.open(TAG, memoryview(sealer.seal(TAG, b"second")))


def early(identity: int, number: int) -> Hello:
    return Hello(identity.to_bytes(8, "little"), A, number, 0, NO_NONCE)


def test_of_early_hellos_the_newest_is_kept() -> None:
    hellos = EarlyHellos()
    for number in (5, 7, 6):
        hellos.keep(early(1, number))
    kept = hellos.take(early(1, 0).identity)
    assert kept is not None
    assert kept.number == 7
    assert hellos.take(kept.identity) is None


def test_early_hellos_are_bounded() -> None:
    hellos = EarlyHellos()
    for identity in range(EARLY_HELLOS + 10):
        hellos.keep(early(identity, 1))
    assert len(hellos) == EARLY_HELLOS
    assert hellos.take(early(0, 1).identity) is None
    assert hellos.take(early(EARLY_HELLOS + 9, 1).identity) is not None


def test_strangers_are_warned_of_once_and_seldom() -> None:
    strangers = Strangers()
    assert strangers.is_news(A, 0.0)
    assert not strangers.is_news(A, 100.0)
    assert strangers.is_news(B, 100.0)
    assert not strangers.is_news(C, 100.0 + WARN_EVERY_S / 2)
    assert strangers.is_news(C, 100.0 + WARN_EVERY_S)


def test_strangers_are_bounded() -> None:
    strangers = Strangers()
    for index in range(STRANGERS + 10):
        assert strangers.is_news(index.to_bytes(8, "little"), index * WARN_EVERY_S)
    assert len(strangers) == STRANGERS
