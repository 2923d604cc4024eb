"""UsageStripper: exactly the usage event goes, wherever the reads cut the stream."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.edits import HELD_MOST, UsageStripper
from tests.support import script as s

USAGE = s.event({"id": "c", "object": "chat.completion.chunk", "choices": [],
                 "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})  # fmt: skip
A, B = s.delta("a"), s.delta("b", finish="stop")


def strip(*pieces: bytes) -> bytes:
    stripper = UsageStripper()
    out = [piece for given_ in pieces for piece in stripper.feed([given_])]
    return b"".join(out + stripper.end())


def cut(data: bytes, at: Iterable[int]) -> list[bytes]:
    places = [0, *sorted(at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


STREAM = A + b": ping\n\n" + B + USAGE + s.DONE
KEPT = A + b": ping\n\n" + B + s.DONE


@pytest.mark.parametrize("form", [bytes, crlf, lambda d: d.replace(b"\n", b"\r")], ids=["lf", "crlf", "cr"])
def test_split_at_every_octet(form: object) -> None:
    """Cut in two at each place, and octet by octet: the same octets, less the usage event."""
    stream, kept = form(STREAM), form(KEPT)  # type: ignore[operator]
    for at in range(len(stream) + 1):
        assert strip(stream[:at], stream[at:]) == kept, at
    assert strip(*(stream[i : i + 1] for i in range(len(stream)))) == kept


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_split_anywhere(at: list[int]) -> None:
    """Any number of cuts."""
    assert strip(*cut(STREAM, at)) == KEPT


@pytest.mark.parametrize("size", [HELD_MOST - 100, HELD_MOST, HELD_MOST + 1, 3 * HELD_MOST])
@pytest.mark.parametrize("form", [bytes, crlf], ids=["lf", "crlf"])
def test_behind_a_long_event(size: int, form: object) -> None:
    """An event too long to be held passes, and the usage event behind it goes, wherever the reads meet."""
    long = form(s.delta("x" * size))  # type: ignore[operator]
    stream = long + form(USAGE + s.DONE)  # type: ignore[operator]
    kept = long + form(s.DONE)  # type: ignore[operator]
    for at in range(len(long) - 6, len(long) + 6):
        assert strip(stream[: at // 2], stream[at // 2 : at], stream[at:]) == kept, at - len(long)
        assert strip(stream[:at], stream[at : at + 1], stream[at + 1 :]) == kept, at - len(long)


def test_memory_is_bounded() -> None:
    """What is held of an endless line is at most `HELD_MOST` and a read."""
    stripper, out = UsageStripper(), 0
    for _ in range(100):
        out += sum(map(len, stripper.feed([b"data: " + b"x" * 4096])))
    assert out >= 100 * 4102 - HELD_MOST - 4102


@pytest.mark.parametrize(
    "other",
    [
        s.delta("b", finish="stop", usage={"prompt_tokens": 1}),  # continuous_usage_stats: usage beside choices
        s.event({"choices": [], "usage": None}),
        s.event({"choices": []}),
        s.event({"usage": {"total_tokens": 1}}),
        s.event({"choices": None, "usage": {"total_tokens": 1}}),
        s.event({"error": {"message": "usage", "choices": []}}),
        s.delta('"choices":[],"usage":{}'),
        b': "usage" choices []\n\n',
        b'data: {"choices":[],"usage":{\n\n',  # no JSON
        b'data: [{"choices":[],"usage":{}}]\n\n',
        s.DONE,
    ],
)
def test_anything_else_stays(other: bytes) -> None:
    """Octet for octet, at once when it is whole, also at the very end and without its end."""
    assert b"".join(UsageStripper().feed([other])) == other
    assert strip(A + other + B) == A + other + B
    assert strip(other[:-1]) == other[:-1]


@pytest.mark.parametrize(
    "usage",
    [
        USAGE.replace(b"data: ", b"data:"),
        b"data: " + json.dumps({"choices": [], "usage": {"total_tokens": 1}}).encode() + b"\n\n",
        b'data: {"usage":{"total_tokens":1},"choices":[ ]}\n\n',
    ],
)
def test_other_spellings_go(usage: bytes) -> None:
    """With and without blanks, in any order of members."""
    assert strip(A + usage + s.DONE) == A + s.DONE


def test_a_held_event_without_its_end_is_given_at_the_end() -> None:
    """What was held when the stream ends is not lost."""
    assert strip(A + b"data: half") == A + b"data: half"


def test_random_streams() -> None:
    """Streams of random events cut at random: what stays is the stream less its usage events."""
    chance = random.Random(5)
    for _ in range(300):
        events = [chance.choice([A, B, USAGE, b": c\n\n", s.DONE]) for _ in range(chance.randrange(12))]
        stream = b"".join(events)
        pieces = cut(stream, (chance.randrange(len(stream) + 1) for _ in range(chance.randrange(20))))
        assert strip(*pieces) == b"".join(e for e in events if e is not USAGE)
