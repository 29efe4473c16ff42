from dataclasses import replace

import pytest

from handoff.compatibility import LAYOUT, Compatibility, IncompatiblePeer
from handoff.relayout.check import check, check_either_way
from handoff.relayout.shape import KvShape

MINE = Compatibility(2, "digest", "bf16", LAYOUT, 30, 4, 64, 16)


def refusal(source: Compatibility, destination: Compatibility) -> str:
    with pytest.raises(IncompatiblePeer, match="prefill-0 can't exchange KV with this node") as caught:
        check(source, destination, "prefill-0")
    return str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{}, {"block_size": 24}, {"ranks": 4}, {"ranks": 8}, {"dtype": "fp32"}, {"block_size": 8, "ranks": 2}],
    ids=str,
)
def test_what_may_differ(change: dict[str, object]) -> None:
    check(MINE, replace(MINE, **change), "prefill-0")  # type: ignore[arg-type]  # fields of their own types


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": 3},
        {"model_digest": "other"},
        {"layout": "layer-major"},
        {"layers": 31},
        {"kv_heads": 8},
        {"head_dim": 128},
        {"slot_bytes": 64},
    ],
    ids=str,
)
def test_what_must_agree_is_refused_by_name_in_both_directions(change: dict[str, object]) -> None:
    other = replace(MINE, **change)  # type: ignore[arg-type]  # one field at a time, of its own type
    ((name, value),) = change.items()
    assert f"{name} is {getattr(MINE, name)} at the source and {value} at the destination" in refusal(MINE, other)
    assert f"{name} is {value} at the source" in refusal(other, MINE)


@pytest.mark.parametrize("pair", [("fp32", "bf16"), ("bf16", "fp16"), ("fp32", "fp16"), ("bf16", "fp8")], ids=str)
def test_a_dtype_that_cannot_hold_every_number_is_refused(pair: tuple[str, str]) -> None:
    said = refusal(replace(MINE, dtype=pair[0]), replace(MINE, dtype=pair[1]))
    assert f"dtype is {pair[0]} at the source and {pair[1]} at the destination" in said
    assert "only bf16 to fp32 and fp16 to fp32 is exact" in said


@pytest.mark.parametrize("change", [{"ranks": 2}, {"dtype": "fp32"}], ids=str)
def test_records_of_slots_are_not_re_laid_out(change: dict[str, object]) -> None:
    hybrid = replace(MINE, slot_bytes=64)
    check(hybrid, replace(hybrid, block_size=32), "prefill-0")
    assert "slot_bytes is 64" in refusal(hybrid, replace(hybrid, **change))  # type: ignore[arg-type]


def test_ranks_that_heads_cannot_be_split_over_are_refused() -> None:
    assert "at the destination ranks is 3 with 4 kv_heads" in refusal(MINE, replace(MINE, ranks=3))
    assert "at the source ranks is 3 with 4 kv_heads" in refusal(replace(MINE, ranks=3), MINE)


def test_a_layout_that_we_cannot_read_is_only_good_for_its_equal() -> None:
    foreign = replace(MINE, layout="layer-major")
    check(foreign, foreign, "prefill-0")
    assert "layout is layer-major" in refusal(foreign, replace(foreign, block_size=32))


def test_a_dtype_that_we_cannot_read_is_only_good_for_its_equal() -> None:
    strange = replace(MINE, dtype="int64")
    check(strange, strange, "prefill-0")
    assert "dtype is int64" in refusal(strange, replace(strange, block_size=32))


def test_everything_in_the_way_is_named_at_once() -> None:
    said = refusal(MINE, replace(MINE, layers=2, dtype="fp16", block_size=8))
    assert "layers" in said
    assert "dtype" in said
    assert "block_size" not in said, "it may differ"


def test_a_link_that_serves_one_direction_is_kept() -> None:
    wide = replace(MINE, dtype="fp32")
    check_either_way(wide, MINE, "prefill-0")
    check_either_way(MINE, wide, "prefill-0")
    with pytest.raises(IncompatiblePeer, match="layers"):
        check_either_way(MINE, replace(wide, layers=1), "prefill-0")


def test_a_refused_peer_changes_nothing_for_the_next() -> None:
    refusal(MINE, replace(MINE, layers=1))
    check(MINE, replace(MINE, block_size=32), "prefill-1")


def test_the_shape_of_a_rank_is_what_its_node_declared() -> None:
    assert KvShape.of(replace(MINE, ranks=2), rank=1) == KvShape(30, 4, 64, 16, "bf16", 2, 1)
