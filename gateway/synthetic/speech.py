"""What an answer says, token by token: reasoning first, then words, then calls of a tool. Pure, but for the generator.

One speech is one choice of one request. Whoever asks for the next tokens gets them in parts, a part being what one delta
of an API can hold: a step of several tokens that goes from reasoning over to words is two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from gateway.synthetic.text import letters, words

TOOL: Final = "get_weather"
# The first token of a call is its name; the rest are its arguments, as the recorded ones were cut.
_ARGUMENTS: Final = ("{", '"city"', ": ", '"東京"', ', "days"', ": 3", "}")
CALL_TOKENS: Final = 1 + len(_ARGUMENTS)


FOLLOWED_MOST: Final = 1024


class Sort(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"  # the name of a tool: it opens a call
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Layout:
    """Which token is what. Counted from 1: `reasoning` tokens, words up to `words`, then `calls`."""

    reasoning: int = 0
    words: int = 1 << 62
    calls: int = 0
    multibyte: bool = False

    @property
    def simple(self) -> bool:
        return not self.reasoning and not self.calls


@dataclass(frozen=True, slots=True)
class Part:
    """What one delta holds: one text a choice, all of one sort. `call`: which of the calls, from 0."""

    sort: Sort
    texts: tuple[str, ...]
    call: int = 0


class Speech:
    """One choice's tokens, and what was said so far."""

    def __init__(self, rng: Random, layout: Layout):
        self._source: Iterator[str] = letters(rng) if layout.multibyte else words(rng)
        self._layout = layout
        self.said: dict[Sort, list[str]] = {sort: [] for sort in (Sort.REASONING, Sort.TEXT)}
        self.calls: list[list[str]] = []
        self._text = self.said[Sort.TEXT]

    def plain(self, tokens: int) -> str:
        """The next tokens of a speech that is nothing but words."""
        source = self._source
        text = next(source) if tokens == 1 else "".join([next(source) for _ in range(tokens)])
        self._text.append(text)
        return text

    def follow(self, begun: str) -> int:
        """Go on behind what stands at the end of `begun` already. Returns how many tokens that is, `FOLLOWED_MOST` at most."""
        ahead = [next(self._source)]
        text = ahead[0]
        followed = int(begun.endswith(text))
        if text in begun:
            for token in itertools.islice(self._source, FOLLOWED_MOST - 1):
                ahead.append(token)
                text += token
                if len(text) > len(begun):
                    break
                if begun.endswith(text):
                    followed = len(ahead)
        self._source = itertools.chain(ahead[followed:], self._source)
        return followed

    def take(self, number: int, tokens: int) -> list[tuple[Sort, int, str]]:
        """The tokens after the `number`-th: sort, call and text of each run of one sort."""
        runs: list[tuple[Sort, int, str]] = []
        for at in range(number + 1, number + tokens + 1):
            sort, call, text = self._token(at)
            self._keep(sort, text)
            if runs and runs[-1][:2] == (sort, call) and sort is not Sort.CALL:
                text = runs.pop()[2] + text
            runs.append((sort, call, text))
        return runs

    def text(self, sort: Sort = Sort.TEXT) -> str:
        return "".join(self.said[sort])

    def _token(self, at: int) -> tuple[Sort, int, str]:
        layout = self._layout
        if at <= layout.reasoning:
            return Sort.REASONING, 0, next(self._source)
        call, step = divmod(at - layout.words - 1, CALL_TOKENS)
        if at <= layout.words or call >= layout.calls:
            return Sort.TEXT, 0, next(self._source)
        return (Sort.CALL, call, TOOL) if step == 0 else (Sort.ARGUMENTS, call, _ARGUMENTS[step - 1])

    def _keep(self, sort: Sort, text: str) -> None:
        if sort is Sort.CALL:
            self.calls.append([])
        elif sort is Sort.ARGUMENTS:
            self.calls[-1].append(text)
        else:
            self.said[sort].append(text)
