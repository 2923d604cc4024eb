"""What may go wrong, and when: the grammar of faults. Pure: parsing and drawing, nothing is done here.

    WHAT[:ARGUMENT][@PLACE][@SCHEDULE][:CHANCE]

    reset@token:3            after the event that holds token 3
    hang@ms:50-200:0.1       at a moment drawn from that range, for one request in ten, as the seed has it
    status:503@every:5       each fifth request
    stall:200@token:2@request:7

What each does is in deploy/mock.md, and in `CATALOGUE` in a line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

Argument = float | int | str | None


class Place(Enum):
    """Where in an answer a fault strikes. TOKEN and MS have a number with them."""

    HEAD = "head"  # instead of the response head, or in it
    ROLE = "role"  # after the events that come before any output
    TOKEN = "token"  # after the event that holds token N; of a fault that damages an event, in that event
    DONE = "done"  # before the terminal event
    END = "end"  # after the last byte
    MS = "ms"  # so many milliseconds after the request came


_STREAM: Final = (Place.ROLE, Place.TOKEN, Place.DONE, Place.MS)
_ANYWHERE: Final = (Place.HEAD, *_STREAM)
_NUMBERED: Final = (Place.TOKEN, Place.MS)
_HIGHEST: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the catalogue. `argument` reads what stands after the colon; `optional`: its value when nothing does."""

    name: str
    places: tuple[Place, ...]
    does: str
    argument: Callable[[str], Argument] | None = None
    form: str = ""
    optional: Argument = None

    @property
    def usual(self) -> tuple[Place, int]:
        """Where it strikes when nothing is said."""
        if self.places == _STREAM:
            return Place.TOKEN, 1
        return self.places[0], 1 if self.places[0] in _NUMBERED else 0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault as it was asked for. `low` to `high`: the token or the millisecond, drawn once for a request."""

    spec: str
    kind: Kind
    argument: Argument
    place: Place
    low: int = 0
    high: int = 0
    every: int = 1
    first: int = 1
    last: int = _HIGHEST
    chance: float = 1.0

    def strike(self, request: int, rng: Random) -> Strike | None:
        """What comes of it for the `request`-th request, counted from 1. Takes two draws of `rng` in any case."""
        roll, number = rng.random(), rng.randint(self.low, self.high)
        due = request % self.every == 0 and self.first <= request <= self.last and roll < self.chance
        return Strike(self.kind.name, self.argument, self.place, number) if due else None


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that will happen to one request, its place settled. `number`: which token, or how many milliseconds."""

    name: str
    argument: Argument
    place: Place
    number: int

    def __str__(self) -> str:
        argument = "" if self.argument is None else f":{self.argument:g}" if _is_number(self.argument) else f":{self.argument}"
        number = f":{self.number}" if self.place in _NUMBERED else ""
        return f"{self.name}{argument}@{self.place.value}{number}"


def _is_number(value: Argument) -> bool:
    return isinstance(value, int | float)


def strikes(faults: Iterable[Fault], request: int, rng: Random) -> tuple[Strike, ...]:
    found = (fault.strike(request, rng) for fault in faults)
    return tuple(strike for strike in found if strike is not None)


# reading --------------------------------------------------------------------------------------------------------------


def parse_all(specs: str | Sequence[str]) -> tuple[Fault, ...]:
    """Faults in a list, or with commas between them; `none` for no fault. Raises ValueError."""
    listed = specs.split(",") if isinstance(specs, str) else specs
    words = [spec.strip() for spec in listed]
    return () if words in (["none"], [""]) else tuple(parse(word) for word in words)


def parse(spec: str) -> Fault:
    """Read one fault. Raises ValueError with what was found and what is expected."""
    what, *clauses = spec.split("@")
    name, *words = what.split(":")
    kind = CATALOGUE.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, CATALOGUE, 1)
        hint = f"the nearest is {near[0]}" if near else "expected one of " + ", ".join(CATALOGUE)
        raise ValueError(f"{spec!r}: unknown fault {name!r}; {hint}")
    chance = 1.0
    try:
        argument, words = _argument(kind, words)
        if not clauses:
            chance, words = _chance(words)
        if words:
            raise ValueError(f"{':'.join(words)!r} is left over")
        place, (low, high) = kind.usual[0], (kind.usual[1], kind.usual[1])
        every, first, last = 1, 1, _HIGHEST
        for at, clause in enumerate(clauses):
            word, *rest = clause.split(":")
            scheduled = word in ("every", "request")
            found = None if scheduled else _place(kind, word)
            needs = 1 if scheduled or found in _NUMBERED else 0
            numbers, rest = rest[:needs], rest[needs:]
            if at == len(clauses) - 1:
                chance, rest = _chance(rest)
            if len(numbers) < needs:
                raise ValueError(f"@{clause} lacks its number")
            if rest:
                raise ValueError(f"{':'.join(rest)!r} is left over")
            if word == "every":
                every, _ = _range(clause, numbers[0], least=1)
            elif word == "request":
                first, last = _range(clause, numbers[0], least=1)
            elif found is not None:
                place = found
                low, high = _range(clause, numbers[0]) if numbers else (0, 0)
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}; expected {form(kind)}") from None
    return Fault(spec, kind, argument, place, low, high, every, first, last, chance)


def form(kind: Kind) -> str:
    """How a fault is written."""
    argument = f"[:{kind.form}]" if kind.optional is not None else f":{kind.form}" if kind.form else ""
    places = "|".join(f"{place.value}:N" if place in _NUMBERED else place.value for place in kind.places)
    return f"{kind.name}{argument}[@{places}][@every:N|request:N][:CHANCE]"


def _argument(kind: Kind, words: list[str]) -> tuple[Argument, list[str]]:
    if kind.argument is None:
        return None, words
    if kind.optional is not None and (not words or (len(words) == 1 and _is_chance(words[0]))):
        return kind.optional, words
    if not words or not words[0]:
        raise ValueError("nothing stands after the colon")
    return kind.argument(words[0]), words[1:]


def _is_chance(word: str) -> bool:
    """No argument that may be left out is as small as that."""
    try:
        return 0 <= float(word) <= 1
    except ValueError:
        return False


def _chance(words: list[str]) -> tuple[float, list[str]]:
    if not words:
        return 1.0, words
    try:
        chance = float(words[0])
    except ValueError:
        raise ValueError(f"{words[0]!r} is not a chance from 0 to 1") from None
    if not 0 <= chance <= 1:
        raise ValueError(f"{words[0]} is not a chance from 0 to 1")
    return chance, words[1:]


def _place(kind: Kind, word: str) -> Place:
    names = {place.value: place for place in Place}
    place = names.get(word)
    if place is None:
        near = difflib.get_close_matches(word, [*names, "every", "request"], 1)
        raise ValueError(f"unknown place {word!r}" + (f", the nearest is {near[0]}" if near else ""))
    if place not in kind.places:
        raise ValueError(f"{kind.name} does not strike at {word}")
    return place


def _range(clause: str, text: str, least: int = 0) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    try:
        found = int(low), int(high if dash else low)
    except ValueError:
        raise ValueError(f"@{clause}: {text!r} is not a number or a range of numbers") from None
    if not least <= found[0] <= found[1] <= _HIGHEST:
        raise ValueError(f"@{clause}: {text} is out of range: {least} or more, the lower first")
    return found


def _status(text: str) -> int:
    if not text.isdecimal() or not 400 <= int(text) <= 599:
        raise ValueError(f"{text!r} is not a status from 400 to 599")
    return int(text)


def _whole(least: int, most: int, what: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a number of {what} from {least} to {most}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise ValueError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value


def _text(text: str) -> str:
    if not text.isprintable() or not text.isascii():
        raise ValueError(f"{text!r} is not the value of a header field")
    return text


_MS = _whole(0, 3_600_000, "milliseconds")
_BYTES = _whole(2, 16 << 20, "bytes")
_RATE = _whole(1, 1 << 30, "bytes a second")
_COUNT = _whole(1, 10_000, "fields")
_H, _T = (Place.HEAD,), (Place.TOKEN,)

_KINDS: Final = (
    # endings
    Kind("refuse", _H, "reset unanswered"),
    Kind("down", _H, "reset unanswered, and for so long the port takes no connection", _seconds, "SECONDS"),
    Kind("hang", _ANYWHERE, "send no more, and keep the connection"),
    Kind("reset", (*_ANYWHERE, Place.END), "end the connection with RST"),
    Kind("close", (*_ANYWHERE, Place.END), "end the connection with FIN, no last chunk"),
    Kind("eof_clean", _STREAM, "end the body in good order, without the terminal event"),
    Kind("eof_trunc", _STREAM, "FIN in the midst of a chunk"),
    Kind("bad_chunk", _STREAM, "a chunk size that is none, then FIN"),
    Kind("error_event", _STREAM, "vLLM's error inside a 200, then [DONE]", _status, "CODE", 500),
    Kind("error_cut", _STREAM, "the error event, then the end without [DONE]", _status, "CODE", 500),
    Kind("abort", _T, "finish_reason abort and [DONE], as at vLLM's shutdown"),
    Kind("recomputed", _T, "stop_reason recomputed and [DONE], as by vLLM Ascend for want of KV blocks"),
    Kind("half_event", _STREAM, "half an event, then the body's end in good order"),
    Kind("half_done", (Place.DONE,), "the body ends within `data: [DO`"),
    Kind("engine_death", _ANYWHERE, "the engine dies: all get its error, /health is 503"),
    # delays
    Kind("stall", _ANYWHERE, "pause, then go on", _MS, "MS"),
    Kind("trickle", _ANYWHERE, "from here on no more than so many bytes a second", _RATE, "BYTES"),
    Kind("cpu", _ANYWHERE, "hold the whole server up", _MS, "MS"),
    Kind("slow_read", _H, "read the request's body no faster than that", _RATE, "BYTES"),
    # the head
    Kind("status", _H, "answer with that status; Retry-After with 429 and 503", _status, "CODE"),
    Kind("ct", _H, "another Content-Type", _text, "VALUE"),
    Kind("ct_missing", _H, "no Content-Type"),
    Kind("ce", _H, "a Content-Encoding that the body does not have", _text, "VALUE"),
    Kind("early_hints", _H, "a 103 before the response"),
    Kind("big_header", _H, "a header field of so many bytes", _BYTES, "BYTES"),
    Kind("many_cookies", _H, "so many Set-Cookie fields", _COUNT, "COUNT"),
    Kind("head_garbage", _H, "what is no HTTP, then FIN"),
    Kind("http09", _H, "the body without a head, then FIN"),
    Kind("cl_short", _H, "a Content-Length one byte short of the body"),
    Kind("cl_long", _H, "a Content-Length that the body never reaches, then FIN"),
    Kind("te_and_cl", _H, "chunked, and a Content-Length"),
    Kind("trailer", _H, "a trailer field after the last chunk"),
    # events
    Kind("long_line", _T, "text of so many bytes in one event", _BYTES, "BYTES"),
    Kind("bad_json", _T, "an event whose data is no JSON"),
    Kind("bad_utf8", _T, "an event whose text is no UTF-8"),
    Kind("nul", _T, "an event with a NUL in it"),
    Kind("wrong_index", _T, "a choice that was not asked for"),
    Kind("ids_change", _T, "from here on another id"),
    Kind("role_missing", (Place.ROLE,), "no event before the first token's"),
    Kind("finish_missing", (Place.DONE,), "no event says why it ended"),
    Kind("dup_done", (Place.DONE,), "the terminal event twice"),
    Kind("data_after_done", (Place.DONE,), "an event after the terminal one"),
    # after the end
    Kind("extra", (Place.END,), "bytes after the end of the body", _BYTES, "BYTES", 16),
    Kind("keepalive_close", (Place.END,), "FIN right after a response that did not say so"),
)
CATALOGUE: Final[dict[str, Kind]] = {kind.name: kind for kind in _KINDS}
