"""Streamed text equals whole text, for any tokens and any cut."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import byte_fallback_tokenizer, byte_level_tokenizer

from cluster.api.detokenizer import Detokenizer
from cluster.api.stop import StopMatcher
from cluster.api.tokenizer import ChatTokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello hello world", "naïve café 🦊🦊 мир"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",), exclude_characters=REPLACEMENT))


@functools.cache
def byte_level() -> ChatTokenizer:
    return ChatTokenizer(byte_level_tokenizer(CORPUS))


@functools.cache
def byte_fallback() -> ChatTokenizer:
    return ChatTokenizer(byte_fallback_tokenizer(CORPUS))


@settings(deadline=None)
@given(TEXT)
def test_byte_level_text_survives_the_round_trip_in_whole_characters(text: str) -> None:
    detokenizer = byte_level().detokenizer(skip_special_tokens=False)
    pieces = [detokenizer.push(token) for token in byte_level().encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)
    assert detokenizer.flush() == ""


@settings(deadline=None)
@given(TEXT.filter(lambda text: "<s>" not in text and "</s>" not in text and "<unk>" not in text))
def test_byte_fallback_text_survives_the_round_trip(text: str) -> None:
    detokenizer = byte_fallback().detokenizer(skip_special_tokens=False)
    tokens = byte_fallback().encode(text, add_special_tokens=False)
    pieces = [detokenizer.push(token) for token in tokens]
    # The encoder writes a space as U+2581, so that character itself comes back as a space.
    expected = text.replace("\u2581", " ")
    assert "".join(pieces) == (f" {expected}" if text else "")


@settings(deadline=None)
@given(st.lists(st.integers(0, 399)))
def test_any_byte_level_tokens_decode_as_the_tokenizer_does(tokens: list[int]) -> None:
    tokens = [token for token in tokens if token < byte_level().vocab_size]
    detokenizer = byte_level().detokenizer(skip_special_tokens=False)
    streamed = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert streamed == byte_level().decode(tokens)


@given(st.binary(), st.data())
def test_text_never_depends_on_how_bytes_are_cut(data: bytes, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)))))
    parts = [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    detokenizer = Detokenizer(parts.__getitem__)
    streamed = "".join(detokenizer.push(i) for i in range(len(parts))) + detokenizer.flush()
    assert streamed == data.decode("utf-8", errors="replace")


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the stop that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


FEW_LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


@given(st.lists(FEW_LETTERS), STOPS, st.booleans())
def test_stops_are_found_as_in_the_whole_text(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    whole = "".join(pieces)
    expected = first_stop(whole, stops)
    matcher = StopMatcher(stops, include_stop=include_stop)
    sent, stopped = "", False
    for piece in pieces:
        result = matcher.push(piece)
        sent += result.text
        if result.is_stopped:
            stopped = True
            break
        assert whole.startswith(sent)
        assert expected is None or len(sent) <= expected[0]
    if expected is None:
        assert not stopped
        assert sent + matcher.flush() == whole
    else:
        assert stopped
        assert sent == whole[: expected[1] if include_stop else expected[0]]


@given(st.lists(FEW_LETTERS), STOPS)
def test_text_is_held_back_only_while_it_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, sent = "", ""
    for piece in pieces:
        result = matcher.push(piece)
        if result.is_stopped:
            return
        seen, sent = seen + piece, sent + result.text
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
