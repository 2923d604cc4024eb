"""What an event is, and heads as uvicorn writes them."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from aiohttp import web


class Mark(Enum):
    """What an event is to the stream, for whoever damages it."""

    OPENING = "opening"  # before any output: a role, message_start, response.created
    OUTPUT = "output"
    FINISH = "finish"  # says why it ended
    USAGE = "usage"
    LAST = "last"  # the terminal event
    OTHER = "other"


class Event(NamedTuple):
    """The event's name, where the dialect has names, and its data."""

    kind: str | None
    data: str
    mark: Mark = Mark.OTHER


DONE: Final = Event(None, "[DONE]", Mark.LAST)
_ORDER: Final = (
    "date",
    "server",
    "allow",
    "content-length",
    "location",
    "content-type",
    "vary",
    "x-synthetic",
    "connection",
    "transfer-encoding",
)


def json_response(text: str, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    head = {**(headers or {}), "content-type": "application/json"}
    return web.Response(body=text.encode("utf-8", "replace"), status=status, headers=head)


async def dress(request: web.Request, response: web.StreamResponse) -> None:
    """Put the head in order just before it is sent: uvicorn's names, spelling and sequence, and our own mark."""
    found = {name.lower(): value for name, value in response.headers.items()}
    found |= {"server": "uvicorn", "vary": "Origin", "x-synthetic": "1"}
    if found.get("content-length") == "0":
        # aiohttp invents a type even for a body that is not there.
        found.pop("content-type", None)
    response.headers.clear()
    for name in _ORDER:
        if name in found:
            response.headers[name] = found.pop(name)
    response.headers.extend(found)
