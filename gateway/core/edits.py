"""Changes to a stream that an option asks for; without one, a stream passes as it came."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec

WHOLE_MOST = 64 << 20  # octets of an unstreamed answer that is held back to be changed
HEARD_MOST = 1 << 20  # octets of an answer that is listened to
HELD_MOST = 65536  # octets of one event that are held back to see whether it is to go; a usage event has some 300
EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode


class EventEditor(abc.ABC):
    """Shows each event of a stream to `edit`, and passes on what that returns, as soon as the event is whole. One that is too
    long to be held passes as it is."""

    resizes: ClassVar[bool] = True  # what passes may have another length than what came
    held_most: ClassVar[int] = HELD_MOST

    def __init__(self) -> None:
        self._held = b""
        self._passing = False  # within an event that is too long to be held

    def feed(self, pieces: list[bytes]) -> list[bytes]:
        data = b"".join((self._held, *pieces))
        looked = max(len(self._held) - 3, 0)  # there is no end before
        self._held = b""
        out = []
        at = 0
        for match in EVENT_END.finditer(data, looked):
            event = data[at : match.end()]
            at = match.end()
            out.append(event if self._passing else self.edit(event))
            self._passing = False
        rest = data[at:]
        if self._passing or len(rest) > self.held_most:
            self._passing = True
            body = rest.rstrip(b"\r\n")  # what may be half of the event's end waits for the other half
            cut = max(len(body), len(rest) - 3)
            out.append(rest[:cut])
            self._held = rest[cut:]
        else:
            self._held = rest
        passed = b"".join(out)
        return [passed] if passed else []

    def end(self) -> list[bytes]:
        held, self._held = self._held, b""
        return [held] if held else []

    @abc.abstractmethod
    def edit(self, event: bytes) -> bytes:
        """One whole event, its blank line included; b"" takes it out."""


class UsageStripper(EventEditor):
    """usage: inject. Takes out exactly the event that the gateway's own stream_options.include_usage brought: no choices,
    and a usage. Any other event passes, octet for octet, as soon as it is whole."""

    def edit(self, event: bytes) -> bytes:
        return b"" if _is_usage(event) else event


def _is_usage(event: bytes) -> bool:
    if b'"usage"' not in event or not event.startswith(b"data:"):
        return False
    try:
        chunk = _decode(event[5:].strip())
    except (msgspec.MsgspecError, RecursionError):
        return False
    return chunk.choices == [] and bytes(chunk.usage) not in (b"", b"null")


class WholeEditor:
    """Changes an unstreamed answer, once all of it is there. One that is too long to be held passes as it is."""

    resizes: ClassVar[bool] = True

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self._change, self._held, self._size = change, list[bytes](), 0

    def feed(self, pieces: list[bytes]) -> list[bytes]:
        self._held += pieces
        self._size += sum(map(len, pieces))
        if self._size <= WHOLE_MOST:
            return []
        passed, self._held = self._held, []
        return passed

    def end(self) -> list[bytes]:
        if self._size > WHOLE_MOST:
            return []
        return [self._change(b"".join(self._held))]


class Editor(Protocol):
    """Changes a body's payload. What it holds back comes with a later piece, or at the end."""

    resizes: ClassVar[bool]  # the body's length is not what it was

    def feed(self, pieces: list[bytes]) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


class Both:
    """One after the other."""

    resizes: ClassVar[bool] = True

    def __init__(self, first: Editor, second: Editor) -> None:
        self._first, self._second = first, second

    def feed(self, pieces: list[bytes]) -> list[bytes]:
        return self._second.feed(self._first.feed(pieces))

    def end(self) -> list[bytes]:
        return [*self._second.feed(self._first.end()), *self._second.end()]


class Listener:
    """Changes nothing: `heard` is told of an answer at its end. Of a long stream it is told the last octets, of another answer
    that is too long nothing."""

    resizes: ClassVar[bool] = False

    def __init__(self, streamed: bool, heard: Callable[[bytes], None]) -> None:
        self._streamed, self._heard, self._kept, self._size = streamed, heard, b"", 0

    def feed(self, pieces: list[bytes]) -> list[bytes]:
        self._size += sum(map(len, pieces))
        if self._streamed:
            self._kept = b"".join((self._kept, *pieces))[-HELD_MOST:]
        elif self._size <= HEARD_MOST:
            self._kept += b"".join(pieces)
        return pieces

    def end(self) -> list[bytes]:
        if self._streamed or self._size <= HEARD_MOST:
            self._heard(self._kept)
        return []
