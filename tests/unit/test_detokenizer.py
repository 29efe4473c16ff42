"""Output text: characters are never cut, stop strings are found across tokens."""

import pytest
from stand_ins import byte_fallback_tokenizer, byte_level_tokenizer

from cluster.api.detokenizer import Detokenizer, UnsupportedTokenizer, byte_level_bytes, token_bytes_rule
from cluster.api.stop import StopMatcher
from cluster.api.tokenizer import ChatTemplateError, ChatTokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello hello world", "naïve café"]


@pytest.fixture(scope="module")
def byte_level() -> ChatTokenizer:
    return ChatTokenizer(byte_level_tokenizer(CORPUS))


@pytest.fixture(scope="module")
def byte_fallback() -> ChatTokenizer:
    return ChatTokenizer(byte_fallback_tokenizer(CORPUS))


def pieces(tokenizer: ChatTokenizer, tokens: tuple[int, ...], **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_a_character_of_many_tokens_comes_whole(byte_level: ChatTokenizer) -> None:
    tokens = byte_level.encode("🦊", add_special_tokens=False)
    assert len(tokens) == 4
    assert pieces(byte_level, tokens) == ["", "", "", "🦊", ""]


def test_byte_fallback_comes_whole(byte_fallback: ChatTokenizer) -> None:
    tokens = byte_fallback.encode("x🦊", add_special_tokens=False)
    assert [p for p in pieces(byte_fallback, tokens) if p][-1] == "🦊"
    assert "".join(pieces(byte_fallback, tokens)) == " x🦊"


def test_an_unfinished_character_is_flushed_as_a_replacement(byte_level: ChatTokenizer) -> None:
    tokens = byte_level.encode("🦊", add_special_tokens=False)[:3]
    assert pieces(byte_level, tokens) == ["", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_broken_bytes_do_not_hold_back_what_follows(byte_level: ChatTokenizer) -> None:
    fox = byte_level.encode("🦊", add_special_tokens=False)
    a = byte_level.encode("q", add_special_tokens=False)
    assert "".join(pieces(byte_level, fox[:2] + a)) == "\N{REPLACEMENT CHARACTER}q"


def test_the_first_space_of_an_answer_stays(byte_fallback: ChatTokenizer) -> None:
    tokens = byte_fallback.encode("fox", add_special_tokens=False)
    assert "".join(pieces(byte_fallback, tokens)) == " fox"


def test_special_tokens_are_hidden_unless_asked_for(byte_level: ChatTokenizer) -> None:
    tokens = byte_level.encode("hello<|im_end|>", add_special_tokens=False)
    assert "".join(pieces(byte_level, tokens)) == "hello"
    assert "".join(pieces(byte_level, tokens, skip_special_tokens=False)) == "hello<|im_end|>"


def test_ids_past_the_vocabulary_have_no_text(byte_level: ChatTokenizer) -> None:
    assert pieces(byte_level, (byte_level.vocab_size + 5,)) == ["", ""]


def test_an_added_token_with_foreign_characters_is_plain_text() -> None:
    assert byte_level_bytes("<tool 1>") == b"<tool 1>"
    assert byte_level_bytes("Ġa") == b" a"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": []}])
def test_tokens_without_bytes_of_their_own_are_refused(decoder: dict[str, object] | None) -> None:
    with pytest.raises(UnsupportedTokenizer, match="byte-level or byte-fallback"):
        token_bytes_rule(decoder)


def test_a_metaspace_decoder_gives_spaces() -> None:
    rule = token_bytes_rule({"type": "Metaspace", "replacement": "▁"})
    assert rule("▁hi") == b" hi"
    assert rule("<0x41>") == b"<0x41>"


def test_a_detokenizer_asks_for_each_token_once() -> None:
    asked: list[int] = []

    def bytes_of(token: int) -> bytes:
        asked.append(token)
        return b"x"

    detokenizer = Detokenizer(bytes_of)
    for token in range(1000):
        detokenizer.push(token)
    assert asked == list(range(1000))


def test_the_chat_template_is_the_models(byte_level: ChatTokenizer) -> None:
    tokens = byte_level.encode_chat([{"role": "user", "content": "hello"}])
    assert byte_level.decode(tokens) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_chat_template_says_so() -> None:
    tokenizer = byte_level_tokenizer(CORPUS)
    tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        ChatTokenizer(tokenizer).encode_chat([{"role": "user", "content": "hello"}])


def test_a_chat_template_that_refuses_gives_its_reason() -> None:
    tokenizer = byte_level_tokenizer(CORPUS)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTokenizer(tokenizer).encode_chat([{"role": "user", "content": "hello"}])


def test_template_options_may_not_replace_our_arguments(byte_level: ChatTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="tokenize"):
        byte_level.encode_chat([{"role": "user", "content": "x"}], template_options={"tokenize": True})


def test_a_stop_string_is_found_across_pieces() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("abcS").text == "abc"
    assert matcher.push("TO").text == ""
    result = matcher.push("P tail")
    assert (result.text, result.is_stopped) == ("", True)


def test_a_false_start_is_sent_once_it_is_decided() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("ST").text == ""
    assert matcher.push("STO").text == "ST"
    assert matcher.flush() == "STO"


def test_a_stop_string_inside_a_false_start_is_found() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa").text == ""
    assert matcher.push("a").text == "a"
    assert matcher.push("b").is_stopped


def test_the_stop_string_is_sent_when_asked_for() -> None:
    result = StopMatcher(["STOP"], include_stop=True).push("one STOP two")
    assert result.text == "one STOP"


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert StopMatcher(["b", "ab"]).push("xab").text == "x"


def test_without_stops_all_text_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything").text == "anything"
    assert matcher.flush() == ""
