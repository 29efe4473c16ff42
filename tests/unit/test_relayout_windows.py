import pytest

from handoff.relayout.windows import Cut, Window, cuts, windows

SIZES = (1, 4, 8, 16, 17, 24)


def test_windows_of_a_prompt_with_a_cached_prefix_and_a_tail() -> None:
    assert windows(16, 24, range(48, 101), staged_blocks=2) == [
        Window(range(3, 5), range(48, 80), range(2, 4)),
        Window(range(5, 7), range(80, 101), range(3, 5)),
    ]


def test_the_source_starts_at_the_block_that_holds_the_first_missing_token() -> None:
    assert windows(16, 8, range(24, 40), staged_blocks=8) == [Window(range(1, 3), range(24, 40), range(3, 5))]


def test_nothing_missing_means_no_window() -> None:
    assert windows(16, 8, range(24, 24), staged_blocks=1) == []


@pytest.mark.parametrize("staged_blocks", [0, -1])
def test_an_area_without_room_is_refused(staged_blocks: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        windows(16, 8, range(24), staged_blocks)


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("destination", SIZES)
@pytest.mark.parametrize("staged_blocks", [1, 3])
def test_every_token_lies_in_one_cut_at_its_place_on_both_sides(
    source: int, destination: int, staged_blocks: int
) -> None:
    for tokens in (range(1), range(100), range(destination, 77), range(3 * destination, 90), range(5, 6)):
        seen = []
        for window in windows(source, destination, tokens, staged_blocks):
            assert 0 < len(window.blocks) <= staged_blocks
            for cut in cuts(window, source, destination):
                staged = list(window.blocks)[cut.staged]
                assert len(staged) == len(cut.into)
                for block, into in zip(staged, cut.into, strict=True):
                    assert into in window.into
                    assert cut.source_offset + cut.length <= source
                    for ahead in range(cut.length):
                        position = block * source + cut.source_offset + ahead
                        assert into * destination + cut.destination_offset + ahead == position
                        seen.append(position)
        assert sorted(seen) == list(tokens)


def test_runs_that_lie_alike_are_one_cut() -> None:
    (window,) = windows(16, 32, range(128), staged_blocks=8)
    assert cuts(window, 16, 32) == [
        Cut(0, 0, 16, slice(0, 7, 2), (0, 1, 2, 3)),
        Cut(0, 16, 16, slice(1, 8, 2), (0, 1, 2, 3)),
    ]


def test_many_blocks_need_no_more_cuts_than_few() -> None:
    (window,) = windows(16, 17, range(7, 16 * 17 * 9), staged_blocks=1000)
    assert len(cuts(window, 16, 17)) <= 16 + 17 + 2
