"""How an answer is to be: every knob, what it takes, and who may turn it. Pure.

The highest wins: a request's `x-synth: k=v;k=v` header, its body's `synth` object, `?k=v&k=v` after its model's name,
`POST /admin/synth`, the command line or the configuration. What each knob does is in deploy/mock.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote

from gateway.synthetic.distribution import Distribution, parse
from gateway.synthetic.faults import Fault, parse_all

MOST_TOKENS: Final = 32_768

Usage = Literal["asked", "none", "final", "continuous", "null", "finish", "wrong", "twice", "after_done"]
Read = Callable[[object], Any]
T = TypeVar("T", bound="Behaviour | Capacity")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one request's answer is like. Seconds, tokens and bytes; a field is a knob of the same name."""

    # time
    ttft: Distribution
    itl: Distribution
    tokens: Distribution
    head: float = 0.0
    role: Literal["first", "early"] = "first"
    speed: float = 1.0
    # what an event holds
    tokens_per_event: Distribution | None = None
    stream_interval: int = 1
    hidden: float = 0.0
    text: Literal["words", "multibyte"] = "words"
    reasoning: int = 0
    reasoning_field: Literal["reasoning", "reasoning_content"] = "reasoning"
    tools: int = 0
    usage: Usage = "asked"
    cached: int = 0
    # how an event is written
    eol: Literal["lf", "crlf", "cr"] = "lf"
    space: bool = True
    bom: bool = False
    event_id: bool = False
    multiline: bool = False
    escape: Literal["raw", "ascii"] = "raw"
    final_blank: bool = True
    comment: float = 0.0
    # how bytes reach the wire
    framing: Literal["chunked", "length", "close"] = "chunked"
    chunk: int = 0
    coalesce: int = 1
    split: int | Literal["none", "utf8", "crlf"] = "none"
    gap: float = 0.0
    # what goes wrong
    fault: tuple[Fault, ...] = ()
    error_body: Literal["json", "html", "empty"] = "json"
    retry_after: int = 1
    replay: str | None = None

    @property
    def plain(self) -> bool:
        """Whether the bytes reach the wire as vLLM's do: one HTTP chunk and one write an event."""
        return self.framing == "chunked" and not self.chunk and self.coalesce == 1 and self.split == "none"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the whole engine can do, and how it is. A request cannot change it."""

    max_num_seqs: int | None = None
    max_num_queued_reqs: int | None = None
    kv_blocks: int | None = None
    slowdown: float = 0.0
    health: str = "ok"
    startup: float = 0.0
    idle_close: float = 5.0  # uvicorn's, as vLLM runs it
    lease: float | None = None  # of KV that waits for a decoder; None: as the connector's engines have it
    store: str | None = None  # the folder that stands for a shared store of KV


# reading --------------------------------------------------------------------------------------------------------------


class _Bad(Exception):
    """A value that the knob does not take."""


@dataclass(frozen=True, slots=True)
class Knob:
    expected: str
    read: Read


def _distribution(*, tokens: bool) -> Read:
    def read(value: object) -> Distribution:
        return value if isinstance(value, Distribution) else parse(value, tokens=tokens)

    return read


def _number(least: float, most: float, *, whole: bool = False, words: Mapping[str, object] | None = None) -> Read:
    def read(value: object) -> object:
        if isinstance(value, str) and words and value in words:
            return words[value]
        if value is None and words and None in words.values():
            return None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise _Bad
        try:
            number = float(value)
        except ValueError:
            raise _Bad from None
        if not math.isfinite(number) or not least <= number <= most or (whole and not number.is_integer()):
            raise _Bad
        return int(number) if whole else number

    return read


def _word(*words: str) -> Knob:
    def read(value: object) -> object:
        if value not in words:
            raise _Bad
        return value

    return Knob(" or ".join(words), read)


def _switch(value: object) -> bool:
    found = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False, "0": False}
    try:
        return found[str(value).lower()]
    except KeyError:
        raise _Bad from None


def _faults(value: object) -> tuple[Fault, ...]:
    if isinstance(value, tuple) and all(isinstance(entry, Fault) for entry in value):
        return value
    if isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)):
        return parse_all(value)
    raise _Bad


def _health(value: object) -> str:
    if value in ("ok", "fail", "hang"):
        return str(value)
    if isinstance(value, str) and value.startswith("flap:"):
        _number(0.01, 3600)(value[5:])
        return value
    raise _Bad


def _recording(value: object) -> str | None:
    if value in (None, "none"):
        return None
    # A path below the folder of recordings, and nowhere else.
    if not isinstance(value, str) or not all(part.strip(".") for part in value.split("/")):
        raise _Bad
    return value


def _folder(value: object) -> str | None:
    if value in (None, "none"):
        return None
    if not isinstance(value, str) or not value.startswith("/"):
        raise _Bad
    return value


_SECONDS = Knob("seconds from 0 to 3600", _number(0, 3600))
_SWITCH = Knob("on or off", _switch)
_UNLIMITED: Final[dict[str, object]] = {"none": None}

KNOBS: Final[dict[str, Knob]] = {
    "ttft": Knob("seconds or a distribution", _distribution(tokens=False)),
    "itl": Knob("seconds or a distribution", _distribution(tokens=False)),
    "tokens": Knob("a number of tokens or a distribution", _distribution(tokens=True)),
    "head": _SECONDS,
    "role": _word("first", "early"),
    "speed": Knob("a factor from 0.001 to 1e9", _number(0.001, 1e9)),
    "tokens_per_event": Knob("a number of tokens or a distribution", _distribution(tokens=True)),
    "stream_interval": Knob("a number of tokens from 1", _number(1, MOST_TOKENS, whole=True)),
    "hidden": Knob("a chance from 0 to 1", _number(0, 1)),
    "text": _word("words", "multibyte"),
    "reasoning": Knob(f"a number of tokens from 0 to {MOST_TOKENS}", _number(0, MOST_TOKENS, whole=True)),
    "reasoning_field": _word("reasoning", "reasoning_content"),
    "tools": Knob("a number of calls from 0 to 64", _number(0, 64, whole=True)),
    "usage": _word("asked", "none", "final", "continuous", "null", "finish", "wrong", "twice", "after_done"),
    "cached": Knob("a number of tokens", _number(0, 1 << 31, whole=True)),
    "eol": _word("lf", "crlf", "cr"),
    "space": _SWITCH,
    "bom": _SWITCH,
    "event_id": _SWITCH,
    "multiline": _SWITCH,
    "escape": _word("raw", "ascii"),
    "final_blank": _SWITCH,
    "comment": _SECONDS,
    "framing": _word("chunked", "length", "close"),
    "chunk": Knob("event, or a number of bytes", _number(1, 1 << 24, whole=True, words={"event": 0})),
    "coalesce": Knob("a number of events, or all", _number(1, 1 << 20, whole=True, words={"all": 0})),
    "split": Knob(
        "a number of bytes, utf8, crlf or none",
        _number(1, 1 << 24, whole=True, words={"none": "none", "utf8": "utf8", "crlf": "crlf"}),
    ),
    "gap": Knob("seconds from 0 to 60", _number(0, 60)),
    "fault": Knob("faults with commas between them, or none", _faults),
    "error_body": _word("json", "html", "empty"),
    "retry_after": Knob("seconds from 0 to 86400, whole", _number(0, 86400, whole=True)),
    "replay": Knob("the name of a recording, as default/chat_stream, or none", _recording),
}
SERVER_KNOBS: Final[dict[str, Knob]] = {
    "max_num_seqs": Knob("a number of requests, or none", _number(1, 1 << 20, whole=True, words=_UNLIMITED)),
    "max_num_queued_reqs": Knob("a number of requests, or none", _number(1, 1 << 20, whole=True, words=_UNLIMITED)),
    "kv_blocks": Knob("a number of blocks, or none", _number(1, 1 << 31, whole=True, words=_UNLIMITED)),
    "slowdown": Knob("a share from 0 to 100", _number(0, 100)),
    "health": Knob("ok, fail, hang or flap:SECONDS", _health),
    "startup": _SECONDS,
    "idle_close": Knob("seconds from 0.001 to 3600", _number(0.001, 3600)),
    "lease": Knob("seconds from 0.001 to 3600, or none", _number(0.001, 3600, words=_UNLIMITED)),
    "store": Knob("a folder, or none", _folder),
}


_OF_CHUNKS = frozenset(("eof_trunc", "bad_chunk"))


def changed(base: T, changes: Mapping[str, object]) -> T:
    """`base` with these knobs turned. Raises ValueError: which knob, what was found, what is expected."""
    table = KNOBS if isinstance(base, Behaviour) else SERVER_KNOBS
    found: dict[str, Any] = {name: _read(table, name, value) for name, value in changes.items()}
    if not found:
        return base
    whole = dataclasses.replace(base, **found)
    if isinstance(whole, Behaviour) and whole.framing != "chunked":
        for fault in whole.fault:
            if fault.kind.name in _OF_CHUNKS:
                raise ValueError(f"fault: {fault.spec} is of a chunk: framing=chunked is expected beside it")
    return whole


def _read(table: Mapping[str, Knob], name: str, value: object) -> object:
    knob = table.get(name)
    if knob is None:
        if name in SERVER_KNOBS:
            raise ValueError(f"{name}: is of the whole server: set it with --set, in mock.knobs or by POST /admin/synth")
        near = difflib.get_close_matches(name, [*KNOBS, *SERVER_KNOBS], 1)
        hint = f"the nearest is {near[0]}" if near else "expected one of " + ", ".join(table)
        raise ValueError(f"{name}: unknown knob; {hint}")
    try:
        return knob.read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except _Bad:
        raise ValueError(f"{name}: found {value!r}; expected {knob.expected}") from None


def pairs(text: str, between: str = ";") -> dict[str, str]:
    """`k=v;k=v`, where `%3B` stands for a semicolon in a value. Raises ValueError."""
    found: dict[str, str] = {}
    for part in text.split(between):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part.strip()!r} is not KNOB=VALUE")
        found[name.strip()] = unquote(value.strip())
    return found


def shown(behaviour: Behaviour | Capacity) -> dict[str, object]:
    """Every knob, as it would be written."""
    return {entry.name: _shown(getattr(behaviour, entry.name)) for entry in dataclasses.fields(behaviour)}


def _shown(value: object) -> object:
    if isinstance(value, Distribution):
        return value.spec
    if isinstance(value, tuple):
        return [fault.spec for fault in value]
    return value
