"""Server-Sent Events, found in octets as they come (WHATWG HTML, 9.2.5 and 9.2.6).

A stream is lines, ended by LF, CR or CRLF. A blank line ends an event, which is what its `data` and `event` lines said.
Everything here works on bytes, for U+2028 and its like are line ends to `str` but not to this format. Reads split the
stream anywhere: inside a character, a CRLF, the byte order mark.

Two ways lead through the scanner. Whole events with LF line ends, which is nearly all that ever comes, are cut out by
`bytes.split`. What is left (an event that a read has cut, a CR, a byte order mark) goes line by line. No octet is
looked at more than a few times, however the stream is split.

Two departures from the standard: an event which the end of the stream has cut off before its blank line is delivered,
for servers do end with `data: [DONE]` and no more; and an event of more than `LIMIT` octets ends the watching for good.
"""

from __future__ import annotations

import msgspec

LIMIT = 1 << 20  # octets held of one unfinished event

_BOM = b"\xef\xbb\xbf"
_LF, _CR = 10, 13  # as integers: they are looked for sooner so


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event. `raw`: its octets but for the blank line, if they came in one read with LF line ends; else empty."""

    data: bytes
    type: bytes = b""
    raw: bytes = b""
    late: bool = False  # its last data line had come with an earlier read: this one brought the blank line only


class Scanner:
    """Shown a stream's octets in any split, it returns the events that they complete.

    `at_boundary` says whether a comment line could be put in just here: nothing has come yet, or an event has just
    ended (a CR may be half of a CRLF, so it ends one only in streams that are known for bare CRs).
    `grew` says whether the last feed has ended a data line of the event that is still open.
    """

    __slots__ = (
        "_bare",
        "_between",
        "_cr",
        "_data",
        "easy",
        "_head",
        "_line",
        "_type",
        "at_boundary",
        "grew",
        "overflowed",
    )

    def __init__(self) -> None:
        self.at_boundary = True
        self.grew = False
        self.overflowed = False
        self._head: bytes | None = b""  # the first octets, until it is known whether they are a byte order mark
        self._line = bytearray()  # the unfinished line
        self._data = bytearray()  # of the open event: its data lines, each with an LF
        self._type = b""
        self._between = True  # the last line was blank, and nothing has come after it
        self._cr = False  # the last octet was a CR: an LF that follows belongs to it
        self._bare = False  # a CR without an LF has been seen
        self.easy = False  # between two events, and nothing to remember

    def feed(self, data: bytes) -> list[Event]:
        if self.easy and _CR not in data and len(data) <= LIMIT and data.endswith(b"\n\n"):
            events: list[Event] = []
            self._whole(data, events)
            return events
        if self._head is not None:
            data = self._begin(data)
        if not data or self.overflowed:
            return []
        self.grew = False
        events = []
        if _CR in data or self._cr:
            self._careful(self._plain(data), events)
        else:
            if not self._between:  # first what ends the open event, so that the rest is whole events
                cut = data.find(b"\n\n") + 2
                if cut < 2:
                    cut = len(data)
                self._careful(data[:cut], events)
                data = data[cut:]
            cut = data.rfind(b"\n\n") + 2
            if cut > 1 and len(data) <= LIMIT and self._between:
                self._whole(data[:cut], events)
                data = data[cut:]
            if data and not self.overflowed:
                self._careful(data, events)
        self.easy = self._between and not self._cr and not self.overflowed
        self.at_boundary = self.easy or (self._between and self._bare and not self.overflowed)
        return events

    def end(self) -> list[Event]:
        """The stream has ended: what it left unfinished counts as an event."""
        events: list[Event] = []
        if not self.overflowed:
            late = not self._line
            if self._line:
                self._field(bytes(self._line))
                self._line.clear()
            self._dispatch(events, late)
        return events

    def begin_with(self, data: bytes) -> bool:
        """Whether nothing has come yet, and `data`, which is a whole event, begins without a byte order mark."""
        if self._head != b"":
            return False
        self._head, self.easy = None, True
        return True

    def _begin(self, data: bytes) -> bytes:
        """Take the byte order mark off. Nothing passes until it is known whether it is one."""
        data = (self._head or b"") + data
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._head, self.at_boundary = data, not data
            return b""
        self._head, self.at_boundary = None, True
        return data.removeprefix(_BOM)

    def _plain(self, data: bytes) -> bytes:
        """The same lines with LF line ends. A CR at the very end counts at once: its LF, if one comes, is dropped."""
        if self._cr:
            if data[0] == _LF:
                data = data[1:]
            else:
                self._bare = True
        self._cr = data.endswith(b"\r")
        data = data.replace(b"\r\n", b"\n")
        self._bare = self._bare or data.count(b"\r") > self._cr
        return data.replace(b"\r", b"\n")

    def _whole(self, data: bytes, events: list[Event]) -> None:
        """Nothing but whole events, with LF line ends."""
        for raw in data.split(b"\n\n"):
            if raw.startswith(b"data: ") and _LF not in raw:
                events.append(Event(raw[6:], b"", raw))
            elif raw:
                for line in raw.split(b"\n"):
                    if line:
                        self._field(line)
                    else:  # the odd one of three line feeds: a blank line before this event, not of it
                        self._dispatch(events, False)
                self._dispatch(events, False, raw)

    def _careful(self, data: bytes, events: list[Event]) -> None:
        """Line by line."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._line:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        for line in lines:
            if line:
                if self._over(len(line)):
                    return
                self._between = False
                self._field(line)
            else:
                self._dispatch(events, not self.grew)
                self._between = True
        if rest:
            self._line += rest
            self._between = False
            self._over(len(self._line))

    def _field(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data += line[6:] if line.startswith(b" ", 5) else line[5:]
        elif line.startswith(b"event:"):
            self._type = line[7:] if line.startswith(b" ", 6) else line[6:]
            return
        elif line == b"event":
            self._type = b""
            return
        elif line != b"data":  # a comment, `id`, `retry`, or what nobody knows
            return
        self._data += b"\n"
        self.grew = True

    def _dispatch(self, events: list[Event], late: bool, raw: bytes = b"") -> None:
        if self._data:
            events.append(Event(bytes(self._data[:-1]), self._type, raw, late))
            self._data.clear()
        self._type = b""
        self.grew = False

    def _over(self, more: int) -> bool:
        """Whether the open event with a line of this length is too long; if so, the watching ends here."""
        if len(self._data) + len(self._type) + more <= LIMIT:
            return False
        self.overflowed, self._type = True, b""
        self._line, self._data = bytearray(), bytearray()
        return True
