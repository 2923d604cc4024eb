"""A client's JSON body, of which a connector changes single members and nothing else.

Between the members that are changed every octet stays the client's own: big integers, 1e-5, the order of keys, blanks,
escapes. A member that a connector owns and that is there twice goes altogether, for parsers take the last one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, KeysView, Mapping, Set
from typing import Any, Final

import msgspec

from gateway.core.inspection import members
from gateway.core.jsonbody import MEMBERS_MOST, Member, values_of

_BLANK: Final = b" \t\r\n"
NULL: Final = b"null"
TRUE: Final = b"true"
FALSE: Final = b"false"
ONE: Final = b"1"
_SPACED: Final = (b", ", b'"%b": %b')  # between members, and a member: as Python's json lays an object out
_COMPACT: Final = (b",", b'"%b":%b')  # JSON.stringify, and Python's clients of OpenAI


class Body:
    """One JSON object: its octets, and its top-level members, whose places are looked for only where it is edited. Raises
    Refusal where it is none."""

    __slots__ = ("_found", "_values", "octets")

    def __init__(self, octets: bytes):
        self.octets = octets
        self._found: list[Member] | None = None
        values: Mapping[str, Any] | None = values_of(octets)
        if values is None:
            within = memoryview(octets)
            self._found = members(octets)
            values = {member.key: within[member.value_begin : member.end] for member in self._found}
        self._values = values  # of a doubled key the last one holds

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def names(self) -> KeysView[str]:
        return self._values.keys()

    @property
    def members(self) -> list[Member]:
        if self._found is None:
            self._found = members(self.octets)
        return self._found

    def raw(self, key: str) -> bytes | None:
        """The octets of a member's value, verbatim. None where it is missing, or null: engines take both alike."""
        found = self._values.get(key)
        if found is None:
            return None
        value = bytes(found)
        return None if value == NULL else value

    def lacks(self, keys: Iterable[str]) -> list[str]:
        """Those that are missing, or null."""
        values = self._values
        return [key for key in keys if key not in values or bytes(values[key]) == NULL]

    def value(self, key: str) -> object:
        """A member's value, decoded. None also where no parser can read it: the engine will refuse it."""
        raw = self.raw(key)
        return None if raw is None else from_json(raw)

    def inner(self, key: str) -> Body | None:
        """The object that a member's value is; None where it is none."""
        raw = self.raw(key)
        return Body(raw) if raw is not None and raw.startswith(b"{") else None

    def edited(self, put: Mapping[str, bytes] = {}, drop: Set[str] = frozenset()) -> bytes:
        """The same octets, with the members of `put` (key -> JSON) in place of the client's own of that name, or behind the
        last member where there is none, and without those that `drop` names. Each key of `put` is there once."""
        values = self._values
        if values and drop.isdisjoint(values) and put.keys().isdisjoint(values):
            return self._appended(put)
        if self._found is None and (laid_out := self._laid_out()) is not None:
            return _rewritten(*laid_out, put, drop)
        octets, found, new = memoryview(self.octets), self.members, dict(put)
        if not found:
            opening = self.octets.index(b"{") + 1
            return b"".join((octets[:opening], _joined(put), octets[opening:]))
        if len(self._values) == len(found) and drop.isdisjoint(self._values):
            return self._replaced(new)
        pieces: list[memoryview | bytes] = [octets[: found[0].begin]]
        kept = False  # a member has passed: what follows it brings its comma
        for i, member in enumerate(found):
            value = new.pop(member.key, None)
            if value is None and (member.key in put or member.key in drop):
                continue
            if kept:
                pieces.append(octets[found[i - 1].end : member.begin])
            kept = True
            pieces.append(octets[member.begin : member.end if value is None else member.value_begin])
            if value is not None:
                pieces.append(value)
        if new:
            pieces += [b", " if kept else b"", _joined(new)]
        pieces.append(octets[found[-1].end :])
        return b"".join(pieces)

    def _laid_out(self) -> tuple[tuple[bytes, bytes], dict[str, bytes]] | None:
        """How its members are laid out, and each as it stands, where it is written as Python's json or JSON.stringify write an
        object: no places need be looked for, which takes several times as long. No member is there twice in such a one."""
        octets, values = self.octets, self._values
        if not 0 < len(values) <= MEMBERS_MOST:
            return None
        layout = _SPACED if octets.startswith(b" ", octets.find(b'":') + 2) else _COMPACT
        comma, member = layout
        members = {key: member % (key.encode(), value) for key, value in values.items()}
        return (layout, members) if octets == b"{%b}" % comma.join(members.values()) else None

    def _appended(self, put: Mapping[str, bytes]) -> bytes:
        """The same, where nothing is touched at all: no places are looked for, but the end."""
        if not put:
            return self.octets
        octets, end = memoryview(self.octets), self.octets.rindex(b"}")
        while octets[end - 1] in _BLANK:
            end -= 1
        return b"".join((octets[:end], b", ", _joined(put), octets[end:]))

    def _replaced(self, new: dict[str, bytes]) -> bytes:
        """The same, where nothing goes and nothing is there twice: only the places of what is new are touched."""
        octets, found, at = memoryview(self.octets), self.members, 0
        pieces: list[memoryview | bytes] = []
        for member in found:
            value = new.pop(member.key, None)
            if value is not None:
                pieces += octets[at : member.value_begin], value
                at = member.end
        if new:
            end = found[-1].end
            pieces += octets[at:end], b", ", _joined(new)
            at = end
        pieces.append(octets[at:])
        return b"".join(pieces)


def _rewritten(layout: tuple[bytes, bytes], members: dict[str, bytes], put: Mapping[str, bytes], drop: Set[str]) -> bytes:
    """`Body.edited` of one that is laid out so."""
    comma, member = layout
    kept = comma.join(
        [
            member % (key.encode(), put[key]) if key in put else as_it_stands
            for key, as_it_stands in members.items()
            if key in put or key not in drop
        ]
    )
    added = _joined({key: value for key, value in put.items() if key not in members})
    return b"{%b%b%b}" % (kept, b", " if kept and added else b"", added)


def _joined(put: Mapping[str, bytes]) -> bytes:
    return b", ".join([b"%b: %b" % (_name(key), value) for key, value in put.items()])


@functools.lru_cache(256)
def _name(key: str) -> bytes:
    return as_json(key)


def from_json(raw: bytes) -> object:
    """JSON as engines read it, integers of any size included; None where it is none."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        try:  # a lone surrogate, NaN, 1e400: Python's own parser takes them
            return json.loads(raw)
        except (ValueError, RecursionError):
            return None


def as_json(value: object) -> bytes:
    return msgspec.json.encode(value)
