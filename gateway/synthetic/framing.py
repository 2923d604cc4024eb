"""Events as bytes, the way vLLM writes them, and the ways that the rules of server-sent events allow besides. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.synthetic.behaviour import Behaviour
from gateway.synthetic.wire import Event

_EOL: Final = {"lf": "\n", "crlf": "\r\n", "cr": "\r"}

Frame = Callable[[Event], bytes]


def framer(behaviour: Behaviour) -> Frame:
    """What turns the events of one stream into bytes, in their order."""
    odd = behaviour.eol != "lf" or not behaviour.space or behaviour.bom or behaviour.event_id or behaviour.multiline
    return _Odd(behaviour) if odd or behaviour.escape == "ascii" else frame


def frame(event: Event) -> bytes:
    """As vLLM does."""
    if event.kind is None:
        return f"data: {event.data}\n\n".encode()
    return f"event: {event.kind}\ndata: {event.data}\n\n".encode()


def comment(text: str, behaviour: Behaviour) -> bytes:
    eol = _EOL[behaviour.eol]
    return f": {text}{eol}{eol}".encode()


class _Odd:
    """Another line ending, no blank after the colon, ids, data over two lines, a byte order mark."""

    def __init__(self, behaviour: Behaviour):
        self._behaviour = behaviour
        self._eol = _EOL[behaviour.eol]
        self._blank = " " if behaviour.space else ""
        self._sent = 0

    def __call__(self, event: Event) -> bytes:
        behaviour, fields = self._behaviour, []
        if event.kind is not None:
            fields.append(("event", event.kind))
        data = _ascii(event.data) if behaviour.escape == "ascii" else event.data
        if behaviour.multiline and data.startswith("{"):
            # A line may end wherever JSON takes a blank.
            fields += [("data", "{"), ("data", data[1:])]
        else:
            fields.append(("data", data))
        if behaviour.event_id:
            fields += [("id", str(self._sent)), ("retry", "1000")]
        mark = "\ufeff" if behaviour.bom and not self._sent else ""
        self._sent += 1
        lines = "".join(f"{name}:{self._blank}{value}{self._eol}" for name, value in fields)
        return f"{mark}{lines}{self._eol}".encode()


def _ascii(data: str) -> str:
    """As json.dumps has it by default: what is not ASCII stands only within the strings of an event's JSON."""
    return "".join(letter if letter.isascii() else _escaped(letter) for letter in data)


def _escaped(letter: str) -> str:
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
