"""Shapes: what is booked without being decoded, and that it changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.dialects import Dialect, chat, completions, messages, responses
from gateway.core.meter import PATIENCE, SHAPE_LIMIT, Meter
from tests.support.metering import (
    DONE,
    EDGES,
    ERROR,
    ROLE,
    START,
    Blind,
    Timed,
    chunk,
    metered,
    sse,
    token,
    total,
    totals,
)


def block(text: str) -> bytes:
    said = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}, "index": 0}
    return sse(said, "content_block_delta")


KINDS: dict[str, tuple[Dialect, Callable[[str], bytes]]] = {
    "content": (chat, token),
    "content and a role": (chat, lambda text: chunk({"role": "assistant", "content": text})),
    "content with blanks": (chat, lambda text: token(text).replace(b'":', b'": ')),
    "reasoning": (chat, lambda text: chunk({"reasoning": text})),
    "reasoning_content": (chat, lambda text: chunk({"content": None, "reasoning_content": text})),
    "arguments": (chat, lambda text: chunk({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})),
    "text": (completions, lambda text: sse({"choices": [{"index": 0, "text": text, "finish_reason": None}]})),
    "messages": (messages, block),
    "thinking": (messages, lambda text: block(text).replace(b'"text":', b'"thinking":')),
    "partial_json": (messages, lambda text: block(text).replace(b'"text":', b'"partial_json":')),
    "two spellings": (chat, lambda text: token(text).replace(b'"id":"c"', b'"id":"c","x":{"content": "y"}')),
    "responses": (responses, lambda text: sse({"type": "response.output_text.delta", "delta": text})),
}
NASTY = [
    '"',
    "\\",
    '\\"',
    '"},"',
    "\n",
    "\r\n",
    "\u2028",
    "é€😀",
    "\x00\x1f",
    "data: ",
    '","finish_reason":"stop',
    "a\\",
    "\\\\",
]
TEXTS = st.one_of(st.sampled_from(["a", "b c", "", *NASTY]), st.text(max_size=6), st.lists(st.sampled_from(NASTY)).map("".join))


@pytest.mark.parametrize("name", KINDS)
def test_shape_is_learnt(name: str) -> None:
    dialect, make = KINDS[name]
    meter = Meter(dialect, EDGES, streamed=True)
    meter.feed(make("zeroth"), 0)
    assert meter.shape is None  # it may be the only one
    meter.feed(make("first"), 1)
    if name in ("two spellings", "responses"):
        assert meter.shape is None
        return
    assert meter.shape is not None
    prefix, suffix = meter.shape
    assert prefix + b"first" + suffix == make("first") and prefix.endswith(b'"') and suffix.endswith(b"\n\n")
    assert meter.least == (0 if name in ("content", "content with blanks", "arguments", "text") else 1)
    assert (prefix + suffix == make("")) is True


@given(st.sampled_from(sorted(KINDS)), st.lists(st.tuples(TEXTS, st.integers(0, 9), st.booleans()), max_size=30), st.data())
@settings(deadline=None, max_examples=400)
def test_shapes_change_nothing(name: str, texts: list[tuple[str, int, bool]], data: st.DataObject) -> None:
    """The same stream, with shapes and without, its events alone or several to a read, cut anywhere or not at all."""
    dialect, make = KINDS[name]
    timed: Timed = []
    at = 0
    for text, gap, other in texts:
        at += gap
        event = make(text) if not other else data.draw(st.sampled_from(OTHERS))
        if timed and not gap and data.draw(st.booleans()):
            timed[-1] = (at, timed[-1][1] + event)
        elif data.draw(st.integers(0, 3)):
            timed.append((at, event))
        else:
            cut = data.draw(st.integers(0, len(event)))
            timed += [(at, event[:cut]), (at, event[cut:])]
    assert totals(metered(dialect, timed), times=True) == totals(metered(dialect, timed, Blind), times=True)


OTHERS = [
    b": keep-alive\n\n",
    b"\n",
    b"data: junk\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"a\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"\\"},"finish_reason":null}]}\n\n',
    ROLE,
    token("x"),
    token("x", usage=(3, 4)),
    token("x", "stop"),
    token("x").replace(b"\n", b"\r\n"),
    chunk({"reasoning": "x"}),
    chunk({"content": "x"}).replace(b'"c"', b'"d"'),
    total(3, 5),
    DONE,
    ERROR,
    block("x"),
]


@pytest.mark.parametrize(
    "octets",
    [
        token("x").replace(b'"x"', b'"x\\"'),  # the quote is part of the text, which then does not end
        token("x").replace(b'"x"', b'"x\ny"'),
        token("x").replace(b'"x"', b'"x\ry"'),
        token("x").replace(b'"x"', b'"x\n\ndata: y"'),
        token("x").replace(b'"x"', b'"'),  # prefix and suffix overlap
        token("x")[:-1],
        token("x")[:-1] + b"x",
    ],
)
@pytest.mark.parametrize("after", [b"", token("y"), token("y") * 3])
def test_what_only_looks_like_the_shape(octets: bytes, after: bytes) -> None:
    timed = [(1, START + token("b")), (2, octets + after), (3, token("b") + b"\n\n" + token("c"))]
    meter = Meter(chat, EDGES, streamed=True)
    meter.feed(timed[0][1], 1)
    assert meter.shape is not None and meter.shape[0] + b"x" + meter.shape[1] == token("x")
    assert totals(metered(chat, timed), times=True) == totals(metered(chat, timed, Blind), times=True)


@pytest.mark.parametrize(
    "event",
    [
        token("x", usage=(1, 2)),
        token("x", "length"),
        sse({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [1]}]}),
        sse({"choices": [{"index": i, "delta": {"content": "x"}} for i in range(2)]}),
        token("x" * SHAPE_LIMIT),
        token(""),
        token('"'),
        chunk({"content": ["x"]}),
        chunk({"content": "x", "reasoning": "y"}),
        ROLE,
    ],
)
def test_shape_is_not_learnt(event: bytes) -> None:
    assert metered(chat, []).shape is None
    meter = Meter(chat, EDGES, streamed=True)
    meter.feed(token('"') * 2, 1)  # output, of which none is learnt either
    assert meter.events == 2 and meter.shape is None
    meter.feed(event, 1)
    assert meter.shape is None


def test_shape_only_at_a_boundary() -> None:
    meter = Meter(chat, EDGES, streamed=True)
    assert meter.at_boundary
    meter.feed(token("a"), 0)
    assert meter.at_boundary and meter.shape is None
    meter.feed(token("a"), 1)
    shape = meter.shape
    assert shape and meter.at_boundary
    meter.output(2)
    assert meter.shape == shape and meter.at_boundary and meter.events == 3
    meter.feed(b": c", 3)
    assert meter.shape is None and not meter.at_boundary
    meter.feed(b"\n\n", 3)
    assert meter.shape == shape
    meter.feed(chunk({"reasoning": "a"}), 4)
    assert meter.shape and meter.shape != shape
    meter.end()
    assert meter.shape is None


def test_a_stream_without_a_shape_is_given_up() -> None:
    meter = Meter(chat, EDGES, streamed=True)
    meter.feed(token("a"), 0)  # from which nothing is learnt
    for n in range(PATIENCE + 1):
        meter.feed(token("a").replace(b'"c"', b'"%d"' % n), n)
        assert (meter.shape is not None) is (n < PATIENCE)
    meter.feed(token("a"), 20)
    assert meter.shape is None and meter.events == PATIENCE + 3
    meter = Meter(chat, EDGES, streamed=True)
    meter.feed(token("a"), 0)
    for n in range(PATIENCE * 3):  # each fits once
        meter.feed(token("a").replace(b'"c"', b'"%d"' % n) * 2, n)
        assert meter.shape is not None


def test_decoding_is_spared() -> None:
    class Counting(dialects.openai.Chat):
        __slots__ = ()

        def read(self, event: Any) -> Any:
            decoded.append(event)
            return super().read(event)

    decoded: list[Any] = []
    stream = ROLE + b"".join(token(f"t{n}") for n in range(100)) + token("x", "stop") + DONE
    for size, most in ((len(stream), 5), (4096, 8), (1000, 25), (100, 103)):
        decoded.clear()
        meter = metered(Counting(), [(at, stream[at : at + size]) for at in range(0, len(stream), size)])
        assert meter.events == 101 and len(decoded) <= most
    decoded.clear()
    metered(Counting(), [(n, octets + b"\n\n") for n, octets in enumerate(stream.split(b"\n\n"))])
    assert len(decoded) == 5  # the role, the first two tokens, the last, the end


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_many_at_once_are_as_many_one_by_one(steps: list[int]) -> None:
    """`outputs` books what as many calls of `output` do."""
    one, many = (metered(chat, [(1, START), (2, token("b")), (2, token("c"))]) for _ in range(2))
    times = [2 + sum(steps[: n + 1]) for n in range(len(steps))]
    for at in times:
        one.output(at)
    many.outputs(times)
    assert totals(one, times=True) == totals(many, times=True)
    assert one.events == 3 + len(steps)


def test_ten_thousand_events_in_one_read() -> None:
    """Cheap, and not quadratic, whatever they are: bounds that only what is quadratic can miss."""
    began = time.process_time()
    for other in (b"", token('"'), b": c\n\n", token("c").replace(b"\n", b"\r\n"), token("x", usage=(1, 2))):
        meter = metered(chat, [(1, ROLE), (2, (token("a") + other) * 10_000)])
        assert meter.events >= 10_000 and meter.reads == 1
    assert time.process_time() - began < 10
