from collections import Counter
from dataclasses import replace

import pytest

from handoff.relayout.routes import routes
from handoff.relayout.shape import BadShape, KvShape

RANKS = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8)
ONE = KvShape(layers=2, kv_heads=8, head_dim=2, block_size=4, dtype="bf16")


def shape(kv_heads: int, ranks: int) -> KvShape:
    return replace(ONE, kv_heads=kv_heads, ranks=ranks)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "held"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (3, 3, [range(1), range(1, 2), range(2, 3)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 2, [range(1), range(1)]),
    ],
)
def test_heads_are_held_in_ranges_and_neighbours_share_one(kv_heads: int, ranks: int, held: list[range]) -> None:
    assert [replace(shape(kv_heads, ranks), rank=rank).heads for rank in range(ranks)] == held


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_heads": 3, "ranks": 2}, "ranks is 2 with 3 kv_heads"),
        ({"kv_heads": 4, "ranks": 6}, "ranks is 6 with 4 kv_heads"),
        ({"rank": 1}, "rank is 1"),
        ({"rank": -1}, "rank is -1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"layers": -1}, "layers is -1"),
        ({"dtype": "fp8"}, "dtype is fp8"),
    ],
    ids=str,
)
def test_a_shape_that_no_pool_has_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(BadShape, match=named):
        replace(ONE, **change)  # type: ignore[arg-type]  # one field at a time, of its own type


@pytest.mark.parametrize("kv_heads", [*HEADS, 3])
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_each_destination_rank_gets_each_of_its_heads_once_from_a_rank_that_holds_it(kv_heads: int, turn: int) -> None:
    degrees = (1, 3, 6) if kv_heads == 3 else RANKS
    for sources in degrees:
        for destinations in degrees:
            found = routes(shape(kv_heads, sources), shape(kv_heads, destinations), turn)
            got: Counter[tuple[int, int]] = Counter()
            for key, route in found.items():
                assert key == route.key == (route.source.rank, route.destination.rank)
                assert set(route.heads) <= set(route.source.heads)
                got.update((route.destination.rank, head) for head in route.heads)
            assert got == {
                (rank, head): 1
                for rank in range(destinations)
                for head in replace(shape(kv_heads, destinations), rank=rank).heads
            }


@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("turn", [0, 3])
def test_the_ranks_that_hold_a_head_send_it_equally_often(kv_heads: int, turn: int) -> None:
    for sources in RANKS:
        for destinations in RANKS:
            found = routes(shape(kv_heads, sources), shape(kv_heads, destinations), turn).values()
            sent = Counter((head, route.source.rank) for route in found for head in route.heads)
            for head in range(kv_heads):
                holders = [r for r in range(sources) if head in replace(shape(kv_heads, sources), rank=r).heads]
                loads = [sent[head, rank] for rank in holders]
                assert max(loads) - min(loads) <= 1, (sources, destinations, loads)


def test_turns_use_every_rank_that_holds_a_head() -> None:
    used = {key for turn in range(4) for key in routes(shape(2, 8), shape(2, 1), turn)}
    assert used == {(rank, 0) for rank in range(8)}


def test_two_source_ranks_of_one_destination_rank_have_two_keys() -> None:
    assert list(routes(shape(8, 2), shape(8, 1))) == [(0, 0), (1, 0)]


def test_a_route_is_direct_only_between_equal_blocks() -> None:
    def direct(**change: object) -> bool:
        (route,) = routes(ONE, replace(ONE, **change)).values()  # type: ignore[arg-type]
        return route.direct

    assert direct()
    assert not direct(block_size=8)
    assert not direct(dtype="fp32")
    assert all(route.direct for route in routes(shape(2, 2), shape(2, 8)).values())
    split, joined = routes(shape(8, 1), shape(8, 2)), routes(shape(8, 2), shape(8, 1))
    assert not any(route.direct or route.whole for route in split.values())
    assert all(route.whole and not route.direct for route in joined.values())


def test_a_staged_block_holds_the_heads_of_the_route() -> None:
    (route, other) = routes(shape(8, 1), shape(8, 2)).values()
    assert (route.source.block_bytes, route.staged_block_bytes) == (2 * 2 * 8 * 4 * 2 * 2, 2 * 2 * 4 * 4 * 2 * 2)
    assert (route.source_heads, other.source_heads, other.destination_heads) == (slice(0, 4), slice(4, 8), slice(0, 4))


@pytest.mark.parametrize("change", [{"layers": 3}, {"kv_heads": 4}, {"head_dim": 4}], ids=str)
def test_two_models_have_no_routes(change: dict[str, int]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(BadShape, match=rf"{name} is \d at the source and {value} at the destination"):
        routes(ONE, replace(ONE, **change))  # type: ignore[arg-type]  # one field at a time, of its own type
