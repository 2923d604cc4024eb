"""The top-level members of a JSON body, found as Python's own parser finds them, in any pieces."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.core.jsonbody import KEY_MOST, SHOWN, Member, Members, NotAnObject, values_of, whole

REFUSED = "kv_transfer_params"


def find(pieces: Iterable[bytes]) -> Members:
    members = Members()
    for piece in pieces:
        members.feed(piece)
    return members


def splits(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def at_every_octet(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ['"', "\\", '\\"', "\\\\", "\u2028", "é", "🙂", "{", "}", ",", "\x00", ""]
)
SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from([1e400, -0.0, 165598928036513123123, 1.0])
)
JSON = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)
BLANK = st.sampled_from(["", " ", "\n", "\t \r\n"])
ENCODERS = [
    lambda v: json.dumps(v),
    lambda v: json.dumps(v, ensure_ascii=False),
    lambda v: json.dumps(v, ensure_ascii=False, separators=(",", ":")),
    lambda v: json.dumps(v, indent=1),
]


def escaped(draw: st.DrawFn, text: str) -> str:
    """`text` as a JSON string, each character escaped or not as chance has it."""
    out = []
    for char in text:
        units = char.encode("utf-16-be")
        must = char in '"\\' or ord(char) < 0x20
        if must or draw(st.integers(0, 3)) == 0:
            digits = "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))
            out.append(digits.upper().replace("\\U", "\\u") if draw(st.booleans()) else digits)
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


@st.composite
def documents(draw: st.DrawFn, key: st.SearchStrategy[str] = TEXT) -> str:
    """An object with keys that may be doubled and are escaped at will, and odd blanks."""
    members = []
    for name, value in draw(st.lists(st.tuples(key, JSON), max_size=5)):
        encode = draw(st.sampled_from(ENCODERS))
        members.append(f"{draw(BLANK)}{escaped(draw, name)}{draw(BLANK)}:{draw(BLANK)}{encode(value)}{draw(BLANK)}")
    return draw(BLANK) + "{" + (",".join(members) or draw(BLANK)) + "}" + draw(BLANK)


def pairs(document: bytes) -> list[tuple[str, Any]]:
    """The top-level members as `json.loads` reads them, doubled ones too. Raises ValueError."""
    found: list[Any] = json.loads(document, object_pairs_hook=lambda p: Pairs(p))
    if not isinstance(found, Pairs):
        raise ValueError("no object")
    return list(found)


class Pairs(list[tuple[str, Any]]):
    pass


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return same(list(a), list(b))
    return type(a) is type(b) and bool(a == b)


CUTS = st.lists(st.integers(0, 10_000), max_size=10)


@settings(max_examples=60)
@given(documents(), CUTS, st.booleans())
def test_members_are_those_that_json_loads_sees(document: str, cuts: list[int], bom: bool) -> None:
    """The same keys in the same order with the same values, doubled ones too, however the body is cut."""
    body = (b"\xef\xbb\xbf" if bom else b"") + document.encode()
    expected = pairs(body)
    in_c(body)
    for pieces in ([body], splits(body, cuts), at_every_octet(body)):
        members = find(pieces)
        assert members.complete and [m.key for m in members.found] == [k for k, _ in expected]
        for member, (_, value) in zip(members.found, expected, strict=True):
            octets = body[member.value_begin : member.end]
            assert same(json.loads(octets, object_pairs_hook=Pairs), value)
            assert member.value == (octets if len(octets) <= SHOWN else None)
            assert body[member.begin : member.begin + 1] == b'"' and body[members.closes_at or 0 :][:1] == b"}"


def in_c(body: bytes) -> None:
    """What is found the quick way, if it is, is what is found octet by octet."""
    found, values = whole(body), values_of(body)
    if found is None:
        return
    members = find([body])
    assert members.complete and found == members.found
    assert values is not None
    assert {m.key: body[m.value_begin : m.end] for m in found} == {key: bytes(value) for key, value in values.items()}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "é" * SHOWN}], "n": 1, "x": {}}, indent=1).encode(),
        b' { } ',
        b'{"a":"\\ud83d\\ude42","b" :null\n,"c": -1e400}\r\n',
    ],
)
def test_ordinary_bodies_are_found_in_c(body: bytes) -> None:
    assert whole(body) == find([body]).found


@pytest.mark.parametrize(
    "body",
    [b'{"a":1,"a":1}', b'{"a":1,"a":12}', b'{"a":12,"a":1}', b'{"\\u0061":1}', b'\xef\xbb\xbf{}', b'{"a":NaN}',
     b'{"%b":1}' % (b"k" * 2000)],
)  # fmt: skip
def test_others_are_not(body: bytes) -> None:
    assert whole(body) is None


def sees(body: bytes) -> list[bool]:
    """Whether the watched member is seen, or the body refused: whole, and octet by octet."""
    found = []
    for pieces in ([body], at_every_octet(body)):
        try:
            found.append(REFUSED in [m.key for m in find(pieces).found])
        except NotAnObject:
            found.append(True)
    return found


HIDDEN = st.sampled_from([REFUSED, REFUSED, REFUSED[:-1], REFUSED + "\x00", "model", ""]) | TEXT


@settings(max_examples=60)
@given(
    documents(HIDDEN),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]),
)
def test_no_document_hides_a_watched_member(document: str, encoding: str) -> None:
    """What `json.loads` reads as having it is seen as having it, or refused; in each encoding that `loads` takes."""
    body = document.encode(encoding)
    if REFUSED in [k for k, _ in pairs(body)]:
        assert sees(body) == [True, True]
    elif encoding == "utf-8":
        assert sees(body) == [False, False]


MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.sampled_from(
            [
                b"",
                b'"',
                b"\\",
                b"\\\\",
                b'\\"',
                b"{",
                b"}",
                b"[",
                b"]",
                b",",
                b":",
                b" ",
                b"\x00",
                b"\xff",
                b"\xef\xbb\xbf",
                b"\\u006b",
                b"\x0c",
                b"/*",
                b"NaN",
                b"'",
                b"\xc2\xa0",
                b"\xc0\xaf",
                b"\xed\xa0\x80",
                b"0",
                b"\\ud800",
                b"\n",
            ]
        ),
    ),
    max_size=4,
)


@settings(max_examples=250)
@given(documents(HIDDEN), MUTATIONS)
def test_no_damaged_document_hides_a_watched_member(document: str, mutations: list[tuple[int, bytes]]) -> None:
    """The same of octets put in and taken out at random, where `loads` still reads the body."""
    body = document.encode()
    for at, octets in mutations:
        at %= len(body) + 1
        body = body[:at] + octets + body[at + (not octets) :]
    try:
        expected = pairs(body)
    except (ValueError, RecursionError):
        assume(False)
    if REFUSED in [k for k, _ in expected]:
        assert sees(body) == [True, True]
    in_c(body)


@settings(max_examples=60)
@given(st.binary(max_size=40), CUTS)
def test_no_octets_upset_it_and_no_cut_changes_what_it_says(junk: bytes, cuts: list[int]) -> None:
    """Found, refused, or not complete: never another error, and the same however it is cut."""
    for body in (junk, b'{"a":' + junk, b'{"a": 1,' + junk + b"}"):
        results: list[tuple[bool, list[Member]] | None] = []
        for pieces in ([body], splits(body, cuts), at_every_octet(body)):
            try:
                members = find(pieces)
                results.append((members.complete, members.found))
            except NotAnObject:
                results.append(None)
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"x"',
        b"1",
        b"null",
        b"x",
        b"{} {}",
        b"{}x",
        b"{}\x00",
        b"\x00{}",
        b"{,}",
        b'{"a":1,}',
        b'{"a" 1}',
        b'{"a":}',
        b'{"a":,"b":1}',
        b"{a:1}",
        b"{'a':1}",
        b'{"a":1 "b":2}',
        b"\xef\xbb{}",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
        '{"a":1}'.encode("utf-16"),
        b"\xfe\xff",
        b"/**/{}",
        b"{}//",
        b"\xc2\xa0{}",
        b"\x0c{}",
        b"{\x0b}",
        b'{"a":"\x00"}',
        b'{"a":1}}',
        b'{"a":1}]',
        b'{"\x00":1}',
    ],
    ids=repr,
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """Whole and octet by octet alike."""
    for pieces in ([body], at_every_octet(body)):
        with pytest.raises(NotAnObject):
            find(pieces)


def test_nesting_and_length_need_no_memory() -> None:
    """A value of any depth and length is passed over; keys and their number are bounded."""
    deep = b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b', "kv_transfer_params": {}, "b": "' + b"\\\\" * 200_000 + b'"}'
    members = find([deep[i : i + 4096] for i in range(0, len(deep), 4096)])
    assert members.complete and [m.key for m in members.found] == ["a", REFUSED, "b"]
    assert members.found[0].value is None
    with pytest.raises(NotAnObject):
        find([b'{"' + b"k" * (KEY_MOST + 1) + b'": 1}'])
    with pytest.raises(NotAnObject):
        find([b"{" + b'"a":1,' * 10_002])


def test_a_bodys_end_is_known() -> None:
    """It is complete behind the closing brace, and not before it."""
    body = b' {"a": {"b": "}"}, "c": "x"} \n'
    for end in range(len(body)):
        assert find([body[:end]]).complete == (end > body.rindex(b"}"))
