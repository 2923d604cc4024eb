"""Text without a model: words to answer with, and a count of what was asked.

A token is at most four characters of one word with the blank before it. That is close to what English costs a real
tokenizer, needs no vocabulary file, and can be put together again. Identifiers are given out in order of first sight,
so that `/detokenize` undoes `/tokenize` within one process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from random import Random
from typing import Any

# A few that are not ASCII: whoever relays these bytes must not care where a character ends.
_WORDS = """
    the a of and to in that is was for on as with by at from this which one would all there their what so up out if
    about into then them can only other new some could time these two may first any now such like our over man even most
    made after also many before must through back years where much your way well down should because each just those
    people how too little state good very make world still own see men work long get here between both life being under
    never day same another know while last might us great old year off come since against go came right used take three
    naïve café Straße 東京 Привет 🙂"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())
_SPACED = tuple(f" {word}" for word in WORDS) + (",", ",", ".", ".")
_LETTERS = "東京日本語éßñПривет🙂🚀👍€—\u2028"
_PIECE = re.compile(r"\s?\S{1,4}|\s{1,4}")
_MAX_VOCABULARY = 65_536


def json_text(value: Any) -> str:
    """JSON as vLLM writes it: no blanks, raw UTF-8. A lone surrogate, which UTF-8 has no bytes for, becomes `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()


@lru_cache(maxsize=4096)
def json_string(text: str) -> str:
    """`json_text` of a short string that comes again and again: the words of the output."""
    return json_text(text)


@lru_cache(maxsize=4096)
def json_bytes(text: str) -> bytes:
    """The same as it goes out."""
    return json_text(text).encode()


def words(rng: Random) -> Iterator[str]:
    """Endless plausible output, a token at a time, the same for the same generator."""
    yield WORDS[int(rng.random() * len(WORDS))].capitalize()
    choices, count = _SPACED, len(_SPACED)
    while True:
        yield choices[int(rng.random() * count)]


def letters(rng: Random) -> Iterator[str]:
    """Output of characters that cost a token a byte, as with a byte-level vocabulary: vLLM holds a character back until it
    is whole, so that all of its tokens but the last have no text."""
    choices, count = _LETTERS, len(_LETTERS)
    while True:
        letter = choices[int(rng.random() * count)]
        yield from [""] * (len(letter.encode()) - 1)
        yield letter


def pieces(text: str) -> list[str]:
    return _PIECE.findall(text)


def count_tokens(texts: Iterable[str]) -> int:
    return sum(len(pieces(text)) for text in texts)


class Vocabulary:
    """Piece to identifier and back. Bounded: past the limit everything new is token 0, the unknown one."""

    def __init__(self, limit: int = _MAX_VOCABULARY):
        self._limit = limit
        self._pieces: list[str] = ["\ufffd"]
        self._ids: dict[str, int] = {}

    def encode(self, tokens: Iterable[str]) -> list[int]:
        return [self._id(token) for token in tokens]

    def decode(self, ids: Iterable[int]) -> str:
        known = self._pieces
        return "".join(known[i] if 0 <= i < len(known) else known[0] for i in ids)

    def _id(self, piece: str) -> int:
        known = self._ids.get(piece)
        if known is None:
            if len(self._pieces) >= self._limit:
                return 0
            known = self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return known
