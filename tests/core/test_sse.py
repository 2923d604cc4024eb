"""The scanner against the grammar of WHATWG HTML 9.2, in every split."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.sse import LIMIT, Event, Scanner

# octets, and the events that they are: (type, data)
GRAMMAR: dict[str, tuple[bytes, list[tuple[bytes, bytes]]]] = {
    "nothing": (b"", []),
    "one": (b"data: x\n\n", [(b"", b"x")]),
    "no blank": (b"data:x\n\n", [(b"", b"x")]),
    "two blanks": (b"data:  x\n\n", [(b"", b" x")]),
    "a tab is no blank": (b"data:\tx\n\n", [(b"", b"\tx")]),
    "several data lines": (b"data: a\ndata: b\ndata:\n\n", [(b"", b"a\nb\n")]),
    "data without a colon": (b"data\n\ndata\ndata\n\ndata:", [(b"", b""), (b"", b"\n"), (b"", b"")]),
    "comment only": (b": keep-alive\n\n", []),
    "comment in an event": (b"data: a\n: c\ndata: b\n\n", [(b"", b"a\nb")]),
    "colon only": (b":\n\ndata: a\n\n", [(b"", b"a")]),
    "type": (b"event: add\ndata: 1\n\ndata: 2\n\n", [(b"add", b"1"), (b"", b"2")]),
    "type after data": (b"data: 1\nevent:add\n\n", [(b"add", b"1")]),
    "type only": (b"event: add\n\ndata: 1\n\n", [(b"", b"1")]),
    "the last type holds": (b"event: a\nevent\nevent:  b\ndata: 1\n\n", [(b" b", b"1")]),
    "id and retry only": (b"id: 7\nretry: 10\n\n", []),
    "id with a NUL": (b"id: \0\ndata: \0x\n\n", [(b"", b"\0x")]),
    "unknown fields, case": (b"Data: x\ndat: y\n data: z\ndata : q\ndatax: r\n\n", []),
    "mark": (b"\xef\xbb\xbfdata: x\n\n", [(b"", b"x")]),
    "two marks": (b"\xef\xbb\xbf\xef\xbb\xbfdata: x\n\ndata: y\n\n", [(b"", b"y")]),
    "mark later": (b"data: x\n\n\xef\xbb\xbfdata: y\n\n", [(b"", b"x")]),
    "half a mark": (b"\xef\xbbdata: x\n\ndata: y\n\n", [(b"", b"y")]),
    "half a mark and no more": (b"\xef\xbb", []),
    "blank lines around": (b"\n\n\ndata: x\n\n\n\n\ndata: y\n\n\n", [(b"", b"x"), (b"", b"y")]),
    "cut": (b"data: x\n\ndata: [DONE]", [(b"", b"x"), (b"", b"[DONE]")]),
    "cut after the line": (b"data: [DONE]\n", [(b"", b"[DONE]")]),
    "cut in a name": (b"data: x\n\ndat", [(b"", b"x")]),
    "separators of str": (
        'data: {"a":"\u2028\u2029\x85\x0b\x0c\x1c"}\n\n'.encode(),
        [(b"", '{"a":"\u2028\u2029\x85\x0b\x0c\x1c"}'.encode())],
    ),
    "colons": (b"data: a: b:c\n\n", [(b"", b"a: b:c")]),
    "not UTF-8": (b"data: \xff\xfe\n\n", [(b"", b"\xff\xfe")]),
}
MIXED = b"data: a\r\ndata: b\rdata: c\n\r\ndata: d\r\revent: e\r\ndata: f\n\r\n\r\r\ndata: g\r"
MIXED_EVENTS = [(b"", b"a\nb\nc"), (b"", b"d"), (b"e", b"f"), (b"", b"g")]


def scan(pieces: list[bytes]) -> list[tuple[bytes, bytes]]:
    scanner = Scanner()
    events: list[Event] = []
    for piece in pieces:
        events += scanner.feed(piece)
    events += scanner.end()
    return [(event.type, event.data) for event in events]


def cut(octets: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(octets)]
    return [octets[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("name", GRAMMAR)
def test_grammar(name: str, ending: bytes) -> None:
    octets, events = GRAMMAR[name]
    octets = octets.replace(b"\n", ending)
    assert scan([octets]) == events
    assert scan([octets[i : i + 1] for i in range(len(octets))]) == events
    for at in range(len(octets)):
        assert scan([octets[:at], b"", octets[at:]]) == events, at


def test_line_ends_mixed() -> None:
    assert scan([MIXED]) == MIXED_EVENTS
    for first in range(len(MIXED)):
        for second in range(first, len(MIXED)):
            assert scan(cut(MIXED, [first, second])) == MIXED_EVENTS


LINES = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b"data",
        b"event: t",
        b"event:",
        b": c",
        b"id: 1",
        b"",
        b"",
        b"\xef\xbb\xbf",
        b"data: \xe2\x82\xac",
    ]
)
ENDS = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=20).map(lambda lines: b"".join(a + b for a, b in lines)), st.data())
@settings(deadline=None, max_examples=300)
def test_any_split_is_the_same(octets: bytes, data: st.DataObject) -> None:
    at = data.draw(st.lists(st.integers(0, len(octets)), max_size=8))
    assert scan(cut(octets, at)) == naive(octets)


def naive(octets: bytes) -> list[tuple[bytes, bytes]]:
    """The standard's own words, one after the other."""
    text = octets.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, kind, data = [], b"", b""
    for line in [*text.split(b"\n"), b""]:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                events.append((kind, data[:-1]))
            kind, data = b"", b""
        elif name == b"event":
            kind = value
        elif name == b"data":
            data += value + b"\n"
    return events


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], [True]),
        ([b"data: x\n\n"], [True, True]),
        ([b"data: x\n", b"\n"], [True, False, True]),
        ([b"data: x", b"\n\n", b"d"], [True, False, True, False]),
        ([b": c\n", b"\n"], [True, False, True]),
        ([b"\n"], [True, True]),
        ([b"\xef", b"\xbb", b"\xbf", b"data: x\n\n"], [True, False, False, True, True]),
        ([b"\xef", b"x\n\n"], [True, False, True]),
        ([b"data: x\r\n\r", b"\n"], [True, False, True]),  # between CR and LF is no place
        ([b"data: x\r\n", b"\r\n"], [True, False, True]),
        ([b"data: x\r\r", b"data: y\r", b"\r"], [True, True, False, True]),  # where CR is the line end, it is one
        ([b"data: x\n\ndata"], [True, False]),
        ([b"data: x\n\n\n\n", b""], [True, True, True]),
    ],
)
def test_boundary(pieces: list[bytes], expected: list[bool]) -> None:
    scanner = Scanner()
    seen = [scanner.at_boundary]
    for piece in pieces:
        scanner.feed(piece)
        seen.append(scanner.at_boundary)
    assert seen == expected


def test_raw_is_the_event_as_it_came() -> None:
    scanner = Scanner()
    scanner.feed(b"data: x\n\n")
    events = scanner.feed(b"event: a\ndata: b\n\ndata: c\n\ndata: d")
    assert [event.raw for event in events] == [b"event: a\ndata: b", b"data: c"]
    assert [event.raw for event in scanner.feed(b"d\n\ndata: e\n\n")] == [b"", b"data: e"]


def test_late_says_that_only_the_blank_line_came() -> None:
    scanner = Scanner()
    assert scanner.feed(b"data: a\n") == [] and scanner.grew
    assert scanner.feed(b": c\n") == [] and not scanner.grew
    assert [event.late for event in scanner.feed(b"\ndata: b\n\n")] == [True, False]
    scanner.feed(b"data: a")
    assert [event.late for event in scanner.feed(b"\n\n")] == [False]
    scanner.feed(b"data: a\n")
    assert [event.late for event in scanner.feed(b"data: b\n\n")] == [False]


@pytest.mark.parametrize("size", [1000, 16384, 1 << 22])
@pytest.mark.parametrize("line", [b"data: ", b": ", b"event: "])
def test_longest_event(size: int, line: bytes) -> None:
    """The limit is the same in every split, and what is beyond it ends the watching for good."""
    fits = line + b"x" * (LIMIT - len(line)) + b"\n\ndata: y\n\n"
    beyond = line + b"x" * (LIMIT - len(line) + 1) + b"\n\ndata: y\n\n"
    for octets, over in ((fits, False), (beyond, True)):
        scanner = Scanner()
        events = scanner.feed(b"data: w\n\n")
        for at in range(0, len(octets), size):
            events += scanner.feed(octets[at : at + size])
        events += scanner.end()
        assert scanner.overflowed is over
        assert [event.data[-1:] for event in events] == [b"w"] + ([] if over else [b"x", b"y"][line != b"data: " :])
        assert scanner.at_boundary is not over
        assert scanner.feed(b"data: z\n\n") == [] or not over


def test_many_lines_of_one_event_are_limited_too() -> None:
    scanner = Scanner()
    for _ in range(LIMIT // 50):
        scanner.feed(b"data: " + b"x" * 60 + b"\n")
    assert scanner.overflowed
    scanner = Scanner()
    for _ in range(LIMIT // 50):  # comments are not held
        scanner.feed(b": " + b"x" * 60 + b"\n")
    assert not scanner.overflowed


def test_no_octet_is_looked_at_again_and_again() -> None:
    """Bounds that only what is quadratic can miss."""
    began = time.process_time()
    scanner = Scanner()
    piece = b"x" * 16384
    for _ in range(4096):
        scanner.feed(piece)
    assert scanner.overflowed
    scanner = Scanner()
    for _ in range(200_000):
        scanner.feed(b"x")
    assert not scanner.overflowed
    scanner = Scanner()
    assert len(scanner.feed(b"data: x\n\n" * 10_000)) == 10_000
    assert len(scanner.feed(b"data: x\r\n\r\n" * 10_000)) == 10_000
    assert time.process_time() - began < 5
