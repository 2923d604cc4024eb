"""Looking into a JSON request body without ever writing it anew.

The gateway reads a few top-level members (the model, whether it is a stream, members a client must not send) and may
splice single values; every other octet stays the client's own, because parsing and writing JSON again changes it: big
integers, 1.0, doubled keys, lone surrogates, blanks.

`Members` finds the top-level members in a body that comes in any pieces, in constant memory. It tracks structure (strings,
nesting), not the whole grammar: what it lets pass and a JSON parser does not is for the backend to refuse. What it must
never do is see other members than the backend's parser sees. So it refuses all that Python's `json.loads`, which engines
use, reads in another way: a NUL anywhere (`loads` also takes UTF-16 and UTF-32), anything but white space around the
object. A byte order mark is skipped, as `loads` does.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import msgspec

SHOWN = 1024  # octets of a value that are kept; longer ones are known by their place alone
KEY_MOST = 1024  # octets of a key; a longer one is no key that anybody asks for
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))  # pydantic 2, conversion table: str to bool
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))
_STRUCTURE = re.compile(rb'["{}\[\]]')
_BLANKS = re.compile(rb"[ \t\r\n]*")
_SCALAR_END = re.compile(rb"[,}\] \t\r\n]")
_OPENING = re.compile(rb"[ \t\r\n]*\{")
_KEY = re.compile(rb'[ \t\r\n]*"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*')  # no escapes
_NEXT = re.compile(rb'[ \t\r\n]*,(?:[ \t\r\n]*"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*)?')  # the comma before it, too
_CLOSING = re.compile(rb"[ \t\r\n]*\}")
_values = msgspec.json.Decoder(dict[str, msgspec.Raw])
MEMBERS_MOST = 10_000


def truth(value: object) -> bool | None:
    """A value as engines (pydantic) read a bool; None where it is none."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return value == 1
    if isinstance(value, str) and (word := value.lower()) in _TRUE | _FALSE:
        return word in _TRUE
    return None


class Member(NamedTuple):
    """One top-level member, by its place in the body (offsets in octets)."""

    key: str
    begin: int  # of its key's opening quote
    value_begin: int
    end: int  # behind its value
    value: bytes | None  # its octets, where there are not too many


class NotAnObject(ValueError):
    """The body is no JSON object that every parser reads alike. The text says where."""


def values_of(body: bytes) -> dict[str, msgspec.Raw] | None:
    """The value of each top-level member of a whole body, the last one of a name; in C. None where only `Members` can tell."""
    try:
        return _values.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def whole(body: bytes) -> list[Member] | None:
    """What `Members` finds in a whole body, several times as fast: the values are found in C, and only their places here. None
    where that is not enough: a name is there twice, or has escapes, or the body is none that everybody reads."""
    values = values_of(body)
    if values is None or len(values) > MEMBERS_MOST or (opening := _OPENING.match(body)) is None:
        return None
    found, at = [], opening.end()
    key = _KEY.match(body, at)
    while key is not None:
        first, last = key.span(1)
        if first < 0 or last - first > KEY_MOST:  # a comma, and no key that is plain
            return None
        name = key[1].decode()
        raw = values.pop(name, None)
        if raw is None:
            return None
        value, begin = bytes(raw), key.end()
        at = begin + len(value)
        if not body.startswith(value, begin):
            return None
        found.append(Member(name, first - 1, begin, at, value if len(value) <= SHOWN else None))
        key = _NEXT.match(body, at)
    return found if not values and _CLOSING.match(body, at) else None


class _At(enum.IntEnum):  # whose hash is an integer's: each step is looked up by it
    START = enum.auto()  # before the opening brace
    KEY = enum.auto()  # before a key, or the closing brace
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()  # before a value
    SCALAR = enum.auto()  # within a number or a word
    STRING = enum.auto()  # within a string that is a member's value
    NESTED = enum.auto()  # within an array or an object that is a member's value
    NESTED_STRING = enum.auto()
    COMMA = enum.auto()  # behind a value
    AFTER = enum.auto()  # behind the closing brace


class Members:
    """Feed it the body; `found` holds the members whose value has ended."""

    def __init__(self) -> None:
        self.found: list[Member] = []
        self.closes_at: int | None = None  # where the closing brace stands
        self._at = _At.START
        self._offset = 0  # of the piece being fed
        self._depth = 0
        self._odd = False  # a string's last octet was a backslash that escapes the next one
        self._kept = bytearray()
        self._key = ""
        self._begin = self._value_begin = 0
        self._comma = False  # a comma has been read: a key must follow

    @property
    def complete(self) -> bool:
        return self._at is _At.AFTER

    def feed(self, data: bytes) -> None:
        """Raises NotAnObject."""
        if b"\0" in data:
            raise self._wrong("a NUL octet", data.index(b"\0"))
        at, size = 0, len(data)
        while at < size:
            at = _STEPS[self._at](self, data, at)
        self._offset += size

    def _wrong(self, what: str, at: int) -> NotAnObject:
        return NotAnObject(f"{what} at octet {self._offset + at}")

    def _start(self, data: bytes, at: int) -> int:
        if self._offset + at < 3 and data[at] == _BOM[self._offset + at] and len(self._kept) == self._offset + at:
            self._kept.append(data[at])
            return at + 1
        if len(self._kept) not in (0, 3):
            raise self._wrong("half a byte order mark", at)
        at = _blanks(data, at)
        if at < len(data):
            if data[at] != 0x7B:
                raise self._wrong("no object begins", at)
            self._kept.clear()
            self._at, at = _At.KEY, at + 1
        return at

    def _before_key(self, data: bytes, at: int) -> int:
        at = _blanks(data, at)
        if at < len(data):
            if data[at] == 0x22:
                self._at, self._begin, self._odd = _At.IN_KEY, self._offset + at, False
                self._kept.clear()
            elif data[at] == 0x7D and not self._comma:
                self._at, self.closes_at = _At.AFTER, self._offset + at
            else:
                raise self._wrong("no key", at)
            at += 1
        return at

    def _in_key(self, data: bytes, at: int) -> int:
        end, closed = self._string(data, at)
        if len(self._kept) + end - at > KEY_MOST:
            raise self._wrong(f"a key of more than {KEY_MOST} octets", at)
        self._kept += data[at:end]
        if not closed:
            return end
        try:
            self._key = (
                msgspec.json.decode(b'"%b"' % bytes(self._kept), type=str) if b"\\" in self._kept else self._kept.decode()
            )
        except (msgspec.DecodeError, UnicodeDecodeError):  # a lone surrogate, or no UTF-8: no key that anybody asks for
            self._key = self._kept.decode("latin-1")
        self._at = _At.COLON
        return end + 1

    def _before_colon(self, data: bytes, at: int) -> int:
        at = _blanks(data, at)
        if at < len(data):
            if data[at] != 0x3A:
                raise self._wrong("no colon behind a key", at)
            self._at, at = _At.VALUE, at + 1
        return at

    def _before_value(self, data: bytes, at: int) -> int:
        at = _blanks(data, at)
        if at == len(data):
            return at
        self._kept.clear()
        self._value_begin = self._offset + at
        first = data[at]
        if first == 0x22:
            self._at, self._odd = _At.STRING, False
        elif first in b"{[":
            self._at, self._depth = _At.NESTED, 1
        elif first in b",}]:":
            raise self._wrong("no value behind a colon", at)
        else:
            self._at = _At.SCALAR
            return at
        self._keep(data, at, at + 1)
        return at + 1

    def _scalar(self, data: bytes, at: int) -> int:
        match = _SCALAR_END.search(data, at)
        end = match.start() if match else len(data)
        self._keep(data, at, end)
        if match:
            self._value_ends(end)
        return end

    def _in_string(self, data: bytes, at: int) -> int:
        end, closed = self._string(data, at)
        self._keep(data, at, end + closed)
        if closed:
            self._value_ends(end + 1)
        return end + closed

    def _nested(self, data: bytes, at: int) -> int:
        begin = at
        while match := _STRUCTURE.search(data, at):
            at = match.end()
            octet = data[at - 1]
            if octet == 0x22:
                self._at, self._odd = _At.NESTED_STRING, False
                end, closed = self._string(data, at)
                at = end + closed
                if not closed:
                    break
                self._at = _At.NESTED
            elif octet in b"{[":
                self._depth += 1
            else:
                self._depth -= 1
                if not self._depth:
                    self._keep(data, begin, at)
                    self._value_ends(at)
                    return at
        self._keep(data, begin, len(data))
        return len(data)

    def _nested_string(self, data: bytes, at: int) -> int:
        end, closed = self._string(data, at)
        self._keep(data, at, end + closed)
        if closed:
            self._at = _At.NESTED
        return end + closed

    def _before_comma(self, data: bytes, at: int) -> int:
        at = _blanks(data, at)
        if at < len(data):
            if data[at] == 0x2C:
                self._at, self._comma = _At.KEY, True
            elif data[at] == 0x7D:
                self._at, self.closes_at = _At.AFTER, self._offset + at
            else:
                raise self._wrong("neither a comma nor the object's end", at)
            at += 1
        return at

    def _after(self, data: bytes, at: int) -> int:
        at = _blanks(data, at)
        if at < len(data):
            raise self._wrong("something behind the object's end", at)
        return at

    def _string(self, data: bytes, at: int) -> tuple[int, int]:
        """Where the string that `at` is within ends: the place of its closing quote and 1, or the data's end and 0."""
        if self._odd:
            self._odd, at = False, at + 1
        while (quote := data.find(b'"', at)) >= 0:
            if quote == at or data[quote - 1] != 0x5C or not _backslashes(data, at, quote) % 2:
                return quote, 1
            at = quote + 1
        self._odd = bool(_backslashes(data, at, len(data)) % 2)
        return len(data), 0

    def _keep(self, data: bytes, begin: int, end: int) -> None:
        room = SHOWN + 1 - len(self._kept)
        if room > 0:
            self._kept += data[begin : min(end, begin + room)]

    def _value_ends(self, at: int) -> None:
        value = bytes(self._kept) if len(self._kept) <= SHOWN else None
        self.found.append(Member(self._key, self._begin, self._value_begin, self._offset + at, value))
        if len(self.found) > MEMBERS_MOST:
            raise self._wrong(f"more than {MEMBERS_MOST:,} members", at)
        self._at, self._comma = _At.COMMA, False


def _backslashes(data: bytes, begin: int, end: int) -> int:
    """How many stand just before `end`, from `begin` on."""
    return end - begin - len(data[begin:end].rstrip(b"\\")) if data.endswith(b"\\", begin, end) else 0


def _blanks(data: bytes, at: int) -> int:
    match = _BLANKS.match(data, at)
    return match.end() if match else at


_STEPS = {
    _At.START: Members._start,
    _At.KEY: Members._before_key,
    _At.IN_KEY: Members._in_key,
    _At.COLON: Members._before_colon,
    _At.VALUE: Members._before_value,
    _At.SCALAR: Members._scalar,
    _At.STRING: Members._in_string,
    _At.NESTED: Members._nested,
    _At.NESTED_STRING: Members._nested_string,
    _At.COMMA: Members._before_comma,
    _At.AFTER: Members._after,
}
