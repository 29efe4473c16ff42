"""From token ids to text, one token at a time, never half a character.

Each token of a byte-level or byte-fallback vocabulary stands for fixed bytes, whatever its neighbours are. So
the text of a stream is the UTF-8 decoding of the joined bytes, and an incremental decoder gives it piece by piece,
in time linear in the output. Bytes that can never become a character turn into U+FFFD, as in a whole decode.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "ByteLevel"}

TokenBytes = Callable[[str], bytes]


class UnsupportedTokenizer(ValueError):
    """The tokenizer's decoder is neither byte-level nor byte-fallback: tokens have no bytes of their own."""


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary, by character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token. A token with any other character (an added one) is plain text."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def token_bytes_rule(decoder: Mapping[str, Any] | None) -> TokenBytes:
    """How a token's string becomes bytes under a `tokenizers` decoder, given in its JSON form.

    A decoder that strips the first space of a text does so to undo the encoder's dummy prefix; an output
    continues a prompt, so nothing is stripped here. Raises UnsupportedTokenizer.
    """
    steps = _steps(decoder)
    names = [step["type"] for step in steps]
    unknown = sorted(set(names) - _KNOWN_STEPS)
    if unknown or not names:
        raise UnsupportedTokenizer(
            f"The tokenizer's decoder ({', '.join(unknown) or 'none'}) does not give each token its own bytes; "
            "use a model with a byte-level or byte-fallback tokenizer."
        )
    replacements = [rule for step in steps if (rule := _replacement(step)) is not None]
    if "ByteLevel" in names:
        return byte_level_bytes
    return _text_rule(replacements, has_byte_tokens="ByteFallback" in names)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] != "Replace":
        return None
    pattern = step["pattern"].get("String")
    if pattern is None:
        raise UnsupportedTokenizer("The tokenizer's decoder replaces by a regular expression, which is not supported.")
    return pattern, step["content"]


def _text_rule(replacements: list[tuple[str, str]], *, has_byte_tokens: bool) -> TokenBytes:
    def rule(token: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return rule


class Detokenizer:
    """The text of one output stream. `bytes_of` gives the bytes of a token id, empty for one that is not shown."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that became certain with `token`; what may still be half a character stays behind."""
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        """What stayed behind, when no token follows: U+FFFD for the started character, if any."""
        return self._decoder.decode(b"", final=True)
