"""Events that are not as they should be: what a fault makes of the events of one stream. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.synthetic.faults import Strike
from gateway.synthetic.framing import Frame
from gateway.synthetic.wire import Event, Mark

# What is done to one event, that which holds the token; and to events of a mark, wherever they are.
ONE: Final = frozenset({"long_line", "bad_json", "bad_utf8", "nul", "wrong_index"})
DAMAGE: Final = ONE | {"ids_change", "role_missing", "finish_missing", "dup_done", "data_after_done"}
_TEXT: Final = re.compile(r'"(?:content|text|delta|reasoning|reasoning_content|thinking|arguments|partial_json)":"')
_MISSING: Final = {"role_missing": Mark.OPENING, "finish_missing": Mark.FINISH}


class Damage:
    """`bytes_of` frames an event, or what is left of it; `struck` has the faults that came to pass, in order."""

    def __init__(self, strikes: Sequence[Strike], frame: Frame):
        self._left = [strike for strike in strikes if strike.name in DAMAGE]
        self._frame = frame
        self._missing = {_MISSING[strike.name]: strike for strike in self._left if strike.name in _MISSING}
        self._last: Event | None = None
        self.struck: list[Strike] = []

    def bytes_of(self, event: Event, token: int) -> list[bytes]:
        """`token`: the last one that is in the event, or was before it."""
        if not self._left:
            return [self._frame(event)]
        missing = self._missing.get(event.mark)
        if missing is not None:
            self._strike(missing, over=False)
            return []
        if event.mark is Mark.LAST:
            return list(self._ending(event))
        if event.mark in (Mark.OUTPUT, Mark.FINISH):
            self._last = event
        return [self._one(event, token)]

    def _one(self, event: Event, token: int) -> bytes:
        raw = b""
        for strike in [s for s in self._left if s.number <= token]:
            if strike.name == "ids_change":
                self._strike(strike, over=False)
                event = event._replace(data=event.data.replace('"id":"', '"id":"other-', 1))
            elif strike.name in ONE and event.mark in (Mark.OUTPUT, Mark.FINISH):
                self._strike(strike)
                event, raw = _spoilt(event, strike)
        framed = self._frame(event)
        return framed.replace(b"\x00", raw) if raw else framed

    def _ending(self, event: Event) -> Iterator[bytes]:
        yield self._frame(event)
        for strike in [s for s in self._left if s.name in ("dup_done", "data_after_done")]:
            self._strike(strike)
            after = event if strike.name == "dup_done" else self._last
            if after is not None:
                yield self._frame(after)

    def _strike(self, strike: Strike, *, over: bool = True) -> None:
        if strike not in self.struck:
            self.struck.append(strike)
        if over:
            self._left.remove(strike)


def _spoilt(event: Event, strike: Strike) -> tuple[Event, bytes]:
    """The event, and what is to stand for its NUL once it is bytes."""
    data = event.data
    if strike.name == "bad_json":
        return event._replace(data=data[:-1]), b""
    if strike.name == "wrong_index":
        return event._replace(data=data.replace('index":0', 'index":7', 1)), b""
    if strike.name == "long_line":
        assert isinstance(strike.argument, int)
        return event._replace(data=_put(data, "x" * strike.argument)), b""
    return event._replace(data=_put(data, "\x00")), b"\xff\xfe" if strike.name == "bad_utf8" else b"\x00"


def _put(data: str, text: str) -> str:
    """`text` at the beginning of the event's own."""
    found = _TEXT.search(data)
    return data if found is None else data[: found.end()] + text + data[found.end() :]
