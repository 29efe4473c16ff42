"""Tags, addresses and the pairing of connection numbers, without UCX."""

import random
from collections import deque

import pytest

from handoff.transports.ucx_env import SETTINGS, apply_settings
from handoff.transports.ucx_links import lane_name, lane_warning
from handoff.transports.ucx_seal import NONCE_BYTES, ClusterKey
from handoff.transports.ucx_wire import (
    FRAME_BIT,
    HELLO_TAG,
    NUMBER_BITS,
    Address,
    Heed,
    Hello,
    Note,
    Pairing,
    Tell,
    is_newer,
    is_note,
    message_tag,
    next_number,
    note_tag,
    number_of,
    piece_tag,
)

LAST_NUMBER = (1 << NUMBER_BITS) - 1
A, B = b"identitA", b"identitB"
KEY = ClusterKey(b"secret")


def nonce_of(number: int) -> bytes:
    """That of each side's number in these tests; none for 0."""
    return number.to_bytes(NONCE_BYTES, "little")


def hello_of(identity: bytes, number: int, seen: int) -> Hello:
    return Hello(identity, A if identity == B else B, number, seen, nonce_of(number), nonce_of(seen))


def pairing_of(number: int) -> Pairing:
    return Pairing(number, nonce_of(number))


def test_tags_keep_kinds_numbers_and_channels_apart() -> None:
    numbers, channels = (1, 2, LAST_NUMBER), (0, 1, 2**32 - 1)
    pieces = {piece_tag(number, channel) for number in numbers for channel in channels}
    messages = {message_tag(number) for number in numbers}
    notes = {note_tag(number) for number in numbers}
    assert len(pieces) == 9
    assert len(pieces | messages | notes | {HELLO_TAG}) == 9 + 3 + 3 + 1
    assert all(is_note(tag) for tag in notes)
    assert not any(is_note(tag) for tag in messages)
    assert all(tag & FRAME_BIT == 0 for tag in pieces)
    assert all(tag & FRAME_BIT for tag in messages | notes | {HELLO_TAG})
    assert [number_of(piece_tag(number, 2**32 - 1)) for number in numbers] == list(numbers)
    assert [number_of(message_tag(number)) for number in numbers] == list(numbers)
    assert [number_of(note_tag(number)) for number in numbers] == list(numbers)


def test_numbers_start_again_after_the_last_and_are_never_zero() -> None:
    assert next_number(LAST_NUMBER) == 1
    assert next_number(1) == 2
    assert is_newer(2, 1)
    assert is_newer(1, LAST_NUMBER)
    assert not is_newer(LAST_NUMBER, 1)
    assert not is_newer(7, 7)


def test_addresses_and_hellos_come_back() -> None:
    address = Address(A, b"h" * 16, b"worker")
    assert Address.unpack(address.pack()) == address
    hello = hello_of(B, LAST_NUMBER, 3)
    assert Hello.unpack(hello.pack(KEY)) == hello


@pytest.mark.parametrize("data", [b"", b"PLA1", b"x" * 100, Address(A, b"h" * 16, b"").pack()])
def test_what_is_no_address_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an address"):
        Address.unpack(data)


@pytest.mark.parametrize("data", [b"", b"x" * 20, hello_of(A, 1, 2).pack(KEY) + b"x"])
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a hello"):
        Hello.unpack(data)


def test_notes_come_back() -> None:
    for note in (Note(Tell.PING), Note(Tell.LANDED, 2**32 - 1, 2**63), Note(Tell.SENT, 5)):
        assert Note.unpack(note.pack()) == note


@pytest.mark.parametrize("data", [b"", Note(Tell.PING).pack() + b"x", b"\xff" + Note(Tell.PING).pack()[1:]])
def test_what_is_no_note_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a note|not a valid Tell"):
        Note.unpack(data)


def settle(left: Pairing, right: Pairing, rng: random.Random) -> list[Heed]:
    """Both say their first hello; deliver all, each way in order, the ways interleaved by `rng`."""
    ways = {A: deque([hello_of(A, left.number, 0)]), B: deque([hello_of(B, right.number, 0)])}
    receivers = {A: right, B: left}
    heeds = []
    while any(ways.values()):
        sender = rng.choice([way for way in (A, B) if ways[way]])
        hello, receiver = ways[sender].popleft(), receivers[sender]
        heeds.append(receiver.heed(hello))
        if heeds[-1] in (Heed.ANSWER, Heed.OPEN_AND_ANSWER):
            back = B if sender == A else A
            ways[back].append(hello_of(back, receiver.number, hello.number))
    return heeds


@pytest.mark.parametrize("seed", range(20))
def test_two_sides_open_for_each_others_number_in_any_order(seed: int) -> None:
    left, right = pairing_of(10), pairing_of(20)
    heeds = settle(left, right, random.Random(seed))
    assert (left.peer_number, right.peer_number) == (20, 10)
    assert len(heeds) <= 4
    assert Heed.SUPERSEDED not in heeds


def test_a_side_opens_only_when_its_own_number_was_seen() -> None:
    side = pairing_of(11)
    assert side.heed(hello_of(B, 20, 10)) is Heed.ANSWER
    assert not side.is_open
    assert side.heed(hello_of(B, 20, 11)) is Heed.OPEN
    assert side.peer_number == 20
    assert side.heed(hello_of(B, 20, 11)) is Heed.IGNORE


def test_a_side_opens_only_when_its_own_nonce_comes_back() -> None:
    side = pairing_of(11)
    assert side.heed(hello_of(B, 20, 0)) is Heed.ANSWER
    assert side.heed(Hello(B, A, 20, 11, nonce_of(20), nonce_of(12))) is Heed.IGNORE
    assert not side.is_open
    assert side.heed(hello_of(B, 20, 11)) is Heed.OPEN


def test_a_newer_number_ends_an_open_pairing_and_an_older_one_is_ignored() -> None:
    side = pairing_of(10)
    side.heed(hello_of(B, 20, 10))
    assert side.heed(hello_of(B, 19, 10)) is Heed.IGNORE
    assert side.heed(hello_of(B, 21, 0)) is Heed.SUPERSEDED
    assert side.peer_number == 20


def test_a_side_that_is_not_open_moves_on_to_a_newer_number() -> None:
    side = pairing_of(10)
    assert side.heed(hello_of(B, 20, 0)) is Heed.ANSWER
    assert side.heed(hello_of(B, 21, 0)) is Heed.ANSWER
    assert side.heed(hello_of(B, 21, 10)) is Heed.OPEN


def test_settings_of_the_user_are_left_alone() -> None:
    environ = {"UCX_RNDV_THRESH": "8k", "UCX_TLS": "tcp"}
    added = apply_settings(environ)
    assert "UCX_TLS" not in added
    assert environ["UCX_TLS"] == "tcp"
    assert environ.keys() == SETTINGS.keys() | {"UCX_RNDV_THRESH"}
    assert apply_settings(environ) == {}


@pytest.mark.parametrize(
    ("transports", "lane"),
    [
        (["self", "posix", "cma", "posix"], "posix+cma"),
        (["tcp"], "tcp"),
        (["rc_mlx5", "tcp"], "rc_mlx5"),
        (["cuda_copy", "cuda_ipc", "tcp"], "cuda_ipc"),
        (["cuda_copy", "tcp"], "tcp"),
        ([], "unknown"),
    ],
)
def test_lane_names(transports: list[str], lane: str) -> None:
    assert lane_name(transports) == lane


def test_tcp_is_worth_a_warning_on_one_host_only() -> None:
    assert lane_warning("tcp", False, {"PRELAY_SHARED_POOLS": "n"}) is None
    assert lane_warning("cma", True, {}) is None
    assert "PRELAY_SHARED_POOLS=n forbids" in str(lane_warning("tcp", True, {"PRELAY_SHARED_POOLS": "n"}))
    assert "--pid=host" in str(lane_warning("tcp in, shm out", True, {}))
