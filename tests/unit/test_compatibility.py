from dataclasses import replace

import pytest
from kv_machine import KvMachine

from handoff.compatibility import LAYOUT, Compatibility, IncompatiblePeer

FACTS = KvMachine(4, 16).facts()
MINE = Compatibility.of(FACTS, protocol=1)


def test_it_is_made_of_what_the_device_says() -> None:
    assert Compatibility(1, "kv-machine", "fp32", LAYOUT, 1, 1, 1, 16) == MINE


def test_the_degree_of_parallelism_is_the_nodes_to_say() -> None:
    assert Compatibility.of(FACTS, protocol=1, ranks=2) == replace(MINE, ranks=2)


def test_equal_settings_agree() -> None:
    other = Compatibility.of(
        replace(FACTS, device="cuda", attention="other", total_blocks=9, model="alias"), protocol=1
    )
    MINE.require_equal(other, "decode-0")
    assert other.digest() == MINE.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": 2},
        {"model_digest": "other"},
        {"dtype": "float32"},
        {"layout": "layer-major"},
        {"layers": 2},
        {"kv_heads": 2},
        {"head_dim": 2},
        {"block_size": 32},
        {"slot_bytes": 64},
        {"ranks": 2},
    ],
    ids=str,
)
def test_each_difference_is_refused_by_name(change: dict[str, object]) -> None:
    other = replace(MINE, **change)  # type: ignore[arg-type]  # one field at a time, of its own type
    ((name, value),) = change.items()
    with pytest.raises(IncompatiblePeer, match=f"decode-0 .* {name} is .* here and {value} there"):
        MINE.require_equal(other, "decode-0")
    assert other.digest() != MINE.digest()


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(IncompatiblePeer, match=r"layers is 1 here and 2 there; block_size is 16 here and 8 there"):
        MINE.require_equal(replace(MINE, layers=2, block_size=8), "decode-0")
