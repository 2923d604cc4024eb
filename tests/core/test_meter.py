"""The meter: the acceptance cases on a virtual clock, every split of them, recordings of a real vLLM, and shapes.

Times are milliseconds in whole numbers, so that sums and gaps are exact.
"""

from __future__ import annotations

import base64
import json
import lzma
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.dialects import Dialect, chat, completions, messages, responses
from gateway.core.meter import PATIENCE, SHAPE_LIMIT, Meter
from gateway.core.outcome import Outcome
from gateway.core.sse import LIMIT

EDGES = tuple(range(400))  # a bucket for each gap
TESTS = Path(__file__).parents[1]
RECORDINGS = TESTS / "vllm" / "recordings"

# -- the streams -------------------------------------------------------------------------------------------------------


def sse(said: Any, type: str = "") -> bytes:
    head = f"event: {type}\n" if type else ""
    return f"{head}data: {json.dumps(said, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def chunk(delta: Any, finish: str | None = None, usage: tuple[int, int] | None = None, index: int = 0) -> bytes:
    said = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return sse({**said, "choices": [choice], **({"usage": counted(*usage)} if usage else {})})


def counted(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token(text: str, finish: str | None = None, usage: tuple[int, int] | None = None, index: int = 0) -> bytes:
    return chunk({"content": text}, finish, usage, index)


def total(prompt: int, completion: int) -> bytes:
    return sse({"id": "c", "choices": [], "usage": counted(prompt, completion)})


ROLE = chunk({"role": "assistant", "content": ""})
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}\n\n'

Timed = list[tuple[int, bytes]]
# The acceptance cases that the data file does not hold: dialect, stream, expected.
MORE: dict[str, tuple[Dialect, Timed, dict[str, Any]]] = {
    "5": (
        chat,
        [
            (300, chunk({"role": "assistant", "content": ""}, usage=(7, 0)) + token("abcd", usage=(7, 4))),
            (340, token("ef", usage=(7, 6))),
            (380, token("gh", "length", (7, 8)) + total(7, 8) + DONE),
        ],
        {
            "ttft_ms": 300,
            "itl_ms": [40, 40],
            "output_tokens": 8,
            "token_source": "usage",
            "tpot_ms": 20.0,
            "k_first": 4,
        },
    ),
    "9": (
        chat,
        [(50, ROLE), (60, chunk({}, "stop") + total(7, 0) + DONE)],
        {"ttft_ms": None, "itl_ms": [], "output_tokens": 0, "token_source": "usage", "outcome": "empty"},
    ),
    "14": (
        responses,
        [
            (5, sse({"type": "response.created", "response": {}}, "response.created")),
            (5, sse({"type": "response.in_progress", "response": {}}, "response.in_progress")),
            (100, sse({"type": "response.output_item.added"}) + sse({"type": "response.content_part.added"})),
            (100, sse({"type": "response.output_text.delta", "delta": "a", "sequence_number": 4})),
            (120, sse({"type": "response.output_text.delta", "delta": "b", "sequence_number": 5})),
            (140, sse({"type": "response.output_text.delta", "delta": "c", "sequence_number": 6})),
            (150, sse({"type": "response.output_text.done", "text": "abc"})),
            (150, sse({"type": "response.completed", "response": {"usage": {"input_tokens": 7, "output_tokens": 3}}})),
        ],
        {"ttft_ms": 100, "itl_ms": [20, 20], "output_tokens": 3, "token_source": "usage", "tpot_ms": 20.0},
    ),
    "19": (
        chat,
        [(100, ROLE + token("a")), (120, token("b"))],
        {"ttft_ms": 100, "itl_ms": [20], "output_tokens": 2, "token_source": "events", "outcome": "truncated"},
    ),
    "21": (
        chat,
        [
            (at, octets.replace(b"\n", b"\r\n"))
            for at, octets in [
                (100, ROLE + token("a")),
                (140, token("b") + token("c")),
                (180, token("d", "length") + total(7, 4) + DONE),
            ]
        ],
        {"ttft_ms": 100, "itl_ms": [40, 0, 40], "output_tokens": 4, "token_source": "usage", "tpot_ms": 26.667},
    ),
    "23": (
        chat,
        [
            (20, sse({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]})),
            (30, sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})),
            (150, sse({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}], "usage": None})),
            (200, sse({"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}], "usage": None})),
            (250, chunk({}, "stop") + total(7, 2) + DONE),
        ],
        {"ttft_ms": 150, "itl_ms": [50], "output_tokens": 2, "token_source": "usage", "tpot_ms": 50.0},
    ),
    "25": (
        chat,
        [(100, ROLE + token("a")), (150, token("b")), (200, token("c", "length", (7, 3)) + DONE)],
        {"ttft_ms": 100, "itl_ms": [50, 50], "output_tokens": 3, "token_source": "continuous", "tpot_ms": 50.0},
    ),
    "29": (
        chat,
        [(100, ROLE + token("")), (120, token("a")), (140, token("b", "length") + total(7, 3) + DONE)],
        {
            "ttft_ms": 100,
            "ttfv_ms": 120,
            "itl_ms": [20, 20],
            "output_tokens": 3,
            "token_source": "usage",
            "tpot_ms": 20.0,
        },
    ),
    "30": (
        chat,
        [(100, ROLE + token("a")), (150, token("bc")), (200, token("d", "length") + DONE)],
        {"ttft_ms": 100, "itl_ms": [50, 50], "output_tokens": 3, "token_source": "events", "tpot_ms": 50.0},
    ),
    "32": (
        chat,
        [
            (100, ROLE + token("a")),
            (120, token("")),
            (140, token("")),
            (160, token("日本")),
            (180, token("", "length") + total(7, 5) + DONE),
        ],
        {"ttft_ms": 100, "itl_ms": [20] * 4, "output_tokens": 5, "token_source": "usage", "tpot_ms": 20.0},
    ),
    "33, the client left": (
        chat,
        [(100, ROLE + token("a", usage=(7, 1))), (120, token("b", usage=(7, 2)))],
        {"ttft_ms": 100, "itl_ms": [20], "output_tokens": 2, "token_source": "continuous", "outcome": "truncated"},
    ),
}
_DIALECTS = {"chat.completions": chat, "completions": completions, "anthropic.messages": messages}


def _cases() -> dict[str, tuple[Dialect, Timed, dict[str, Any]]]:
    held = json.loads((TESTS / "data" / "metrics_cases.json").read_text())["cases"]
    cases = dict(MORE)
    for case in held:
        timed = [(segment["t_ms"], base64.b64decode(segment["b64"])) for segment in case["segments"]]
        cases[str(case["id"])] = _DIALECTS[case["dialect"]], timed, case["expected"]
    return cases


CASES = _cases()
# A clean end of bytes and a reset are the same to the meter: the relay knows which it was.
OUTCOMES = {
    "ok": Outcome.COMPLETE,
    "empty": Outcome.EMPTY,
    "stream_error": Outcome.STREAM_ERROR,
    "truncated": Outcome.UPSTREAM_TRUNCATED,
    "upstream_reset": Outcome.UPSTREAM_TRUNCATED,
}


class Blind(Meter):
    """Without shapes: it decodes every event."""

    __slots__ = ()

    def _learn(self, raw: bytes, reading: Any) -> None:
        pass


def metered(dialect: Dialect, timed: Iterable[tuple[int, bytes]], kind: type[Meter] = Meter) -> Meter:
    meter = kind(dialect, EDGES, streamed=True)
    for at, octets in timed:
        meter.feed(octets, at)
    meter.end()
    return meter


def gaps(meter: Meter) -> list[int]:
    """In order of size."""
    return [gap for gap, n in enumerate(meter.itl_counts) for _ in range(n)]


def totals(meter: Meter, *, times: bool = False) -> dict[str, Any]:
    """What does not depend on how the stream was split; and with `times`, all else too."""
    names = "events choices finish_reason terminal error opaque prompt_tokens cached_tokens output_tokens token_source"
    names += " k_first"
    if times:
        names += " first_output last_output first_visible reads itl_counts itl_sum itl_n max_gap tpot tpot_skipped"
    return {name: getattr(meter, name) for name in names.split()} | {"verdict": meter.verdict(True)}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    dialect, timed, expected = CASES[name]
    meter = metered(dialect, timed)
    itl = expected["itl_ms"]
    assert meter.first_output == expected["ttft_ms"]
    if "ttfv_ms" in expected:
        assert meter.first_visible == expected["ttfv_ms"]
    assert gaps(meter) == sorted(itl or [])
    assert (meter.itl_n, meter.itl_sum) == (len(itl or []), sum(itl or []))
    assert meter.max_gap == (max(itl) if itl else None)
    assert meter.output_tokens == expected["output_tokens"]
    assert meter.token_source == expected["token_source"]
    assert meter.k_first == expected.get("k_first", 1)
    assert (None if meter.tpot is None else round(meter.tpot, 3)) == expected.get("tpot_ms")
    assert meter.verdict(True) is OUTCOMES[expected.get("outcome", "ok")]


def test_why_there_is_no_tpot() -> None:
    skipped = {name: metered(*CASES[name][:2]).tpot_skipped for name in CASES}
    assert {name: why for name, why in skipped.items() if why} == {
        "2": "estimated",
        "6": "single_read",
        "8": "single_token",
        "9": "single_token",
        "17": "incomplete",
        "18": "incomplete",
        "19": "incomplete",
        "20": "incomplete",
        "24": "n_gt_1",
        "30": "estimated",
        "31": "single_token",
        "33, the client left": "incomplete",
    }


@pytest.mark.parametrize("name", CASES)
def test_case_in_every_split_in_two_and_octet_by_octet(name: str) -> None:
    dialect, timed, _ = CASES[name]
    octets = b"".join(part for _, part in timed)
    whole = totals(metered(dialect, [(7, octets)]), times=True)
    assert totals(metered(dialect, [(7, octets[i : i + 1]) for i in range(len(octets))]), times=True) == whole
    for at in range(len(octets)):
        assert totals(metered(dialect, [(7, octets[:at]), (7, octets[at:])]), times=True) == whole, at
    assert totals(metered(dialect, timed)) == totals(metered(dialect, [(7, octets)]))


@pytest.mark.parametrize("ending", [b"\r\n", b"\r"])
@pytest.mark.parametrize("name", CASES)
def test_case_with_other_line_ends(name: str, ending: bytes) -> None:
    dialect, timed, _ = CASES[name]
    changed = [(at, octets.replace(b"\r\n", b"\n").replace(b"\n", ending)) for at, octets in timed]
    assert totals(metered(dialect, changed), times=True) == totals(metered(dialect, timed), times=True)


@given(st.sampled_from(sorted(CASES)), st.data())
@settings(deadline=None, max_examples=300)
def test_any_split(name: str, data: st.DataObject) -> None:
    dialect, timed, _ = CASES[name]
    octets = b"".join(part for _, part in timed)
    at = [0, *sorted(data.draw(st.lists(st.integers(0, len(octets)), max_size=30))), len(octets)]
    pieces = [(7, octets[a:b]) for a, b in pairwise(at)]
    assert totals(metered(dialect, pieces), times=True) == totals(metered(dialect, [(7, octets)]), times=True)


# -- how a stream ends -------------------------------------------------------------------------------------------------

START = ROLE + token("a")


@pytest.mark.parametrize(
    ("stream", "outcome"),
    [
        (START + token("b", "stop") + DONE, Outcome.COMPLETE),
        (START + token("b", "stop") + b"data: [DONE]", Outcome.COMPLETE),
        (START + token("b", "abort") + DONE, Outcome.STREAM_ERROR),
        (START + token("b", "error") + DONE, Outcome.STREAM_ERROR),
        (START + token("b", "abort"), Outcome.STREAM_ERROR),
        (START + DONE, Outcome.STREAM_ERROR),
        (ROLE + DONE, Outcome.STREAM_ERROR),
        (b": keep-alive\n\n" + DONE, Outcome.STREAM_ERROR),
        (START + ERROR + DONE, Outcome.STREAM_ERROR),
        (START + token("b", "stop") + ERROR + DONE, Outcome.STREAM_ERROR),
        (START + token("b", "stop") + DONE + ERROR, Outcome.STREAM_ERROR),
        (token("a", "abort") + token("b", "stop", index=1) + DONE, Outcome.STREAM_ERROR),
        (token("a", "stop") + token("b", "abort", index=1) + DONE, Outcome.STREAM_ERROR),
        (ROLE + chunk({}, "stop") + DONE, Outcome.EMPTY),
        (START + token("b", "stop"), Outcome.UPSTREAM_TRUNCATED),
        (START + token("b", "stop") + b"data: [DO", Outcome.UPSTREAM_TRUNCATED),
        (START[:-20], Outcome.UPSTREAM_TRUNCATED),
        (b"", Outcome.UPSTREAM_TRUNCATED),
    ],
)
def test_verdict(stream: bytes, outcome: Outcome) -> None:
    meter = metered(chat, [(1, stream)])
    assert meter.verdict(True) is outcome
    assert meter.verdict(False) is outcome  # what its terminal event says is not taken back by its framing


def test_verdict_of_messages() -> None:
    part = sse({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}})
    stop = sse({"type": "message_stop"}, "message_stop")
    for reason, outcome in (("end_turn", Outcome.COMPLETE), (None, Outcome.STREAM_ERROR)):
        end = sse({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 1}})
        assert metered(messages, [(1, part + end + stop)]).verdict(True) is outcome
        assert metered(messages, [(1, part + end)]).verdict(True) is Outcome.UPSTREAM_TRUNCATED


def unstreamed(dialect: Dialect, body: bytes, size: int = 7) -> Meter:
    meter = Meter(dialect, EDGES, streamed=False)
    for at in range(0, len(body), size):
        meter.feed(body[at : at + size], at)
    meter.end()
    return meter


def test_unstreamed() -> None:
    body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop"}], "usage": counted(7, 5)}).encode()
    meter = unstreamed(chat, body)
    assert (meter.output_tokens, meter.token_source, meter.prompt_tokens, meter.finish_reason) == (
        5,
        "usage",
        7,
        "stop",
    )
    assert (meter.events, meter.first_output, meter.last_output, meter.tpot, meter.itl_n) == (0, None, None, None, 0)
    assert not meter.at_boundary and meter.shape is None
    assert meter.verdict(True) is Outcome.COMPLETE
    assert meter.verdict(False) is Outcome.UPSTREAM_TRUNCATED
    for reason in (b"abort", b"error"):
        assert unstreamed(chat, body.replace(b"stop", reason)).verdict(True) is Outcome.STREAM_ERROR
    assert unstreamed(chat, b'{"error":{"type":"T"}}').verdict(True) is Outcome.STREAM_ERROR
    for body in (b"", b"<html>", b"{}", b'{"choices":'):
        assert unstreamed(chat, body).verdict(True) is Outcome.COMPLETE


def test_an_answer_too_long_to_be_kept() -> None:
    meter = unstreamed(chat, b'{"usage":{"completion_tokens":5},"x":"' + b"x" * LIMIT + b'"}', 65536)
    assert meter.opaque and meter.output_tokens == 0
    assert meter.verdict(True) is Outcome.COMPLETE and meter.verdict(False) is Outcome.UPSTREAM_TRUNCATED


def test_an_event_too_long_to_be_watched() -> None:
    meter = metered(chat, [(1, START), (2, token('"' + "x" * LIMIT)), (3, token("a") + DONE)])
    assert meter.opaque and meter.events == 1 and not meter.at_boundary and meter.shape is None
    assert meter.verdict(True) is Outcome.COMPLETE and meter.verdict(False) is Outcome.UPSTREAM_TRUNCATED
    meter = metered(chat, [(1, START + ERROR), (2, token('"' + "x" * LIMIT))])
    assert meter.verdict(True) is Outcome.STREAM_ERROR
    big = metered(chat, [(1, START + token("x" * (LIMIT - 300)) + token("b", "stop") + DONE)])
    assert not big.opaque and big.events == 3 and big.verdict(True) is Outcome.COMPLETE


# -- times and counts --------------------------------------------------------------------------------------------------


def test_buckets_hold_what_is_up_to_their_edge() -> None:
    meter = Meter(chat, (10, 20), streamed=True)
    for at in (0, 10, 21, 41, 62, 62):
        meter.feed(token("a"), at)
    assert meter.itl_counts == [2, 2, 1] and meter.itl_n == 5 and meter.itl_sum == 62 and meter.max_gap == 21
    assert (meter.events, meter.reads) == (6, 5)


def test_an_event_is_as_old_as_its_data_line() -> None:
    meter = metered(chat, [(10, token("a")[:-1]), (20, b": c\n"), (90, b"\n" + token("b")[:-2]), (95, b"\n\n")])
    assert (meter.first_output, meter.last_output) == (10, 95)
    assert metered(chat, [(10, token("a")[:-1])]).first_output == 10
    assert metered(chat, [(10, token("a")[:-5]), (20, token("a")[-5:-2])]).first_output == 20


def test_gaps_are_taken_once() -> None:
    meter = metered(chat, [(1, START), (5, token("b")), (7, token("c"))])
    assert meter.take_itl() == ([0, 0, 1, 0, 1] + [0] * (len(EDGES) - 4), 6, 2)
    assert meter.take_itl() == ([0] * (len(EDGES) + 1), 0, 0)
    meter.feed(token("d"), 10)
    assert (meter.itl_n, meter.itl_sum, meter.events, meter.reads, meter.max_gap) == (1, 3, 4, 4, 4)


def test_a_second_choice_ends_the_gaps() -> None:
    meter = metered(chat, [(1, START), (5, token("b")), (7, token("c"))])
    meter.take_itl()
    meter.feed(token("d"), 10)
    meter.feed(chunk({"role": "assistant", "content": ""}, index=1), 11)
    assert (meter.itl_n, meter.itl_sum, meter.max_gap, meter.choices, meter.shape) == (0, 0, None, 2, None)
    for at in (12, 13, 13):
        meter.feed(token("e", index=at % 2), at)
    assert (meter.itl_n, meter.itl_sum, meter.max_gap, meter.events, meter.reads) == (0, 0, None, 7, 6)
    assert meter.take_itl() == ([0] * (len(EDGES) + 1), 0, 0) and meter.last_output == 13


def test_cumulative_usage_never_goes_back() -> None:
    meter = metered(
        chat, [(1, token("a", usage=(7, 4)) + token("b", usage=(7, 2)) + token("c", index=1, usage=(7, 3)))]
    )
    assert (meter.output_tokens, meter.token_source, meter.prompt_tokens, meter.k_first) == (7, "continuous", 7, 4)


def test_token_ids() -> None:
    def ids(*ids: int) -> bytes:
        return sse({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": ids}]})

    meter = metered(chat, [(1, ROLE + ids(1, 2)), (3, ids(3)), (7, ids(4, 5, 6) + chunk({}, "stop") + DONE)])
    assert (meter.output_tokens, meter.token_source, meter.k_first, meter.tpot) == (6, "token_ids", 2, 1.5)


# -- shapes ------------------------------------------------------------------------------------------------------------


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
TEXTS = st.one_of(
    st.sampled_from(["a", "b c", "", *NASTY]), st.text(max_size=6), st.lists(st.sampled_from(NASTY)).map("".join)
)


@pytest.mark.parametrize("name", KINDS)
def test_shape_is_learnt(name: str) -> None:
    dialect, make = KINDS[name]
    meter = Meter(dialect, EDGES, streamed=True)
    meter.feed(make("first"), 1)
    if name in ("two spellings", "responses"):
        assert meter.shape is None
        return
    assert meter.shape is not None
    prefix, suffix = meter.shape
    assert prefix + b"first" + suffix == make("first") and prefix.endswith(b'"') and suffix.endswith(b"\n\n")
    assert meter.least == (0 if name in ("content", "content with blanks", "arguments", "text") else 1)
    assert (prefix + suffix == make("")) is True


@given(
    st.sampled_from(sorted(KINDS)), st.lists(st.tuples(TEXTS, st.integers(0, 9), st.booleans()), max_size=30), st.data()
)
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
    timed = [(1, START), (2, octets + after), (3, token("b") + b"\n\n" + token("c"))]
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
    meter.feed(event, 1)
    assert meter.shape is None


def test_shape_only_at_a_boundary() -> None:
    meter = Meter(chat, EDGES, streamed=True)
    assert meter.at_boundary
    meter.feed(token("a"), 1)
    shape = meter.shape
    assert shape and meter.at_boundary
    meter.output(2)
    assert meter.shape == shape and meter.at_boundary and meter.events == 2
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
    for n in range(PATIENCE + 1):
        meter.feed(token("a").replace(b'"c"', b'"%d"' % n), n)
        assert (meter.shape is not None) is (n < PATIENCE)
    meter.feed(token("a"), 20)
    assert meter.shape is None and meter.events == PATIENCE + 2
    meter = Meter(chat, EDGES, streamed=True)
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
    assert len(decoded) == 4  # the role, the first token, the last, the end


# -- recordings of a real vLLM -----------------------------------------------------------------------------------------


class Recording(NamedTuple):
    path: str
    chunked: bool
    pieces: list[bytes]  # the body as its framing cuts it
    complete: bool


def load(name: str) -> Recording | None:
    """A 200 on a path with a dialect."""
    file = RECORDINGS / f"{name}.resp"
    octets = file.read_bytes() if file.exists() else lzma.decompress(Path(f"{file}.xz").read_bytes())
    path = (RECORDINGS / f"{name}.req").read_bytes().split(b" ", 2)[1].decode()
    while octets.startswith(b"HTTP/1.1 100"):
        octets = octets.partition(b"\r\n\r\n")[2]
    head, _, body = octets.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or dialects.for_path(path) is None:
        return None
    if b"transfer-encoding: chunked" in head:
        return Recording(path, True, *dechunked(body))
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return Recording(path, False, [body[:length]], len(body) >= length)


def dechunked(body: bytes) -> tuple[list[bytes], bool]:
    pieces: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        if size == b"0":
            return pieces, True
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return pieces, False


NAMES = sorted(str(file.relative_to(RECORDINGS)).removesuffix(".req") for file in RECORDINGS.glob("*/*.req"))
RECORDED = {name: recording for name in NAMES if (recording := load(name))}


def naive(path: str, stream: bytes) -> dict[str, Any]:
    """What a stream says, by the plainest of means: vLLM's streams, read event by event into dictionaries."""
    said: dict[str, Any] = {
        "events": 0,
        "tokens": None,
        "finish": None,
        "terminal": False,
        "error": False,
        "prompt": None,
    }
    for text in stream.decode().split("\n\n"):
        data = "".join(line[6:] for line in text.split("\n") if line.startswith("data: "))
        if not data:
            continue
        if data == "[DONE]":
            said["terminal"] = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if event.get("error"):
            said["error"] = True
        elif "choices" in event:
            openai_says(path, event, said)
        else:
            typed_says(event, said)
    return said


def openai_says(path: str, event: dict[str, Any], said: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        said["prompt"] = usage["prompt_tokens"]
    if usage and not event["choices"]:
        said["tokens"] = usage["completion_tokens"]
    brought = path == "/v1/completions" and bool(event["choices"])
    for choice in event["choices"]:
        said["finish"] = choice["finish_reason"] or said["finish"]
        delta = choice.get("delta", {})
        brought |= any(delta.get(key) for key in ("content", "reasoning", "tool_calls"))
        brought |= delta.get("content") == "" and "role" not in delta
    said["events"] += brought


def typed_says(event: dict[str, Any], said: dict[str, Any]) -> None:
    kind, delta = event["type"], event.get("delta") or {}
    if kind.startswith("response."):
        said["events"] += bool(kind.endswith(".delta") and delta)
        if kind == "response.completed":
            usage, cut = event["response"]["usage"], event["response"]["incomplete_details"]
            said |= {"terminal": True, "tokens": usage["output_tokens"], "prompt": usage["input_tokens"]}
            said["finish"] = cut["reason"] if cut else "completed"
    elif kind == "content_block_delta":
        said["events"] += any(delta.get(key) for key in ("text", "thinking", "partial_json"))
    elif kind == "message_delta":
        usage = event["usage"]
        said |= {"finish": delta["stop_reason"], "tokens": usage["output_tokens"]}
        said["prompt"] = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    elif kind == "message_start":
        said["prompt"] = event["message"]["usage"]["input_tokens"]
    elif kind == "message_stop":
        said["terminal"] = True


@pytest.mark.parametrize("name", [name for name, recording in RECORDED.items() if recording.chunked])
def test_recorded_stream(name: str) -> None:
    path, _, pieces, complete = RECORDED[name]
    dialect = dialects.for_path(path)
    assert dialect is not None
    stream = b"".join(pieces)
    meter = metered(dialect, enumerate(pieces))
    said = naive(path, stream)
    assert (meter.events, meter.finish_reason, meter.terminal) == (said["events"], said["finish"], said["terminal"])
    assert (meter.prompt_tokens, meter.error is not None) == (said["prompt"], said["error"])
    if said["tokens"] is not None:
        assert (meter.output_tokens, meter.token_source) == (said["tokens"], "usage")
    if said["error"] or (said["terminal"] and said["finish"] in (None, "abort")):
        expected = Outcome.STREAM_ERROR
    elif not said["terminal"]:
        expected = Outcome.UPSTREAM_TRUNCATED
    else:
        expected = Outcome.COMPLETE if said["events"] else Outcome.EMPTY
    assert meter.verdict(complete) is expected
    assert not meter.opaque
    if meter.choices == 1 and meter.events:
        assert meter.itl_n == meter.events - 1
        assert meter.first_output is not None and meter.last_output is not None
        assert meter.itl_sum == meter.last_output - meter.first_output
    for other in ([(1, stream)], [(1, stream[at : at + 1460]) for at in range(0, len(stream), 1460)]):
        assert totals(metered(dialect, other)) == totals(meter) == totals(metered(dialect, other, Blind))


@pytest.mark.parametrize("name", [name for name, recording in RECORDED.items() if not recording.chunked])
def test_recorded_answer(name: str) -> None:
    path, _, pieces, complete = RECORDED[name]
    dialect = dialects.for_path(path)
    assert dialect is not None
    answer = json.loads(pieces[0])
    usage = answer["usage"]
    meter = unstreamed(dialect, pieces[0], 1000)
    assert meter.output_tokens == usage.get("completion_tokens", usage.get("output_tokens"))
    cached = usage.get("cache_read_input_tokens") or 0
    assert meter.prompt_tokens == usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached)
    reason = answer.get("stop_reason") or (answer["choices"][-1]["finish_reason"] if "choices" in answer else None)
    assert reason is None or meter.finish_reason == reason
    assert meter.verdict(complete) is (Outcome.STREAM_ERROR if reason == "abort" else Outcome.COMPLETE)


# What became of requests whose server was killed, stopped or told to end; by hand.
FAILED = {
    "api_kill9_completions_stream": Outcome.UPSTREAM_TRUNCATED,
    "api_kill9_messages_stream": Outcome.COMPLETE,  # it had just ended
    "api_kill9_responses_stream": Outcome.UPSTREAM_TRUNCATED,
    "api_kill9_stream": Outcome.UPSTREAM_TRUNCATED,
    "engine_kill9_completions_stream": Outcome.STREAM_ERROR,
    "engine_kill9_messages_stream": Outcome.COMPLETE,
    "engine_kill9_responses_stream": Outcome.UPSTREAM_TRUNCATED,
    "engine_kill9_stream": Outcome.STREAM_ERROR,
    "engine_stop_messages_stream": Outcome.COMPLETE,
    "engine_stop_nonstream": Outcome.COMPLETE,
    "engine_stop_stream": Outcome.COMPLETE,
    "sigterm_completions_stream": Outcome.UPSTREAM_TRUNCATED,
    "sigterm_default_nonstream": Outcome.STREAM_ERROR,
    "sigterm_default_responses_stream": Outcome.COMPLETE,  # nothing in it tells that it was cut
    "sigterm_default_stream": Outcome.STREAM_ERROR,
    "sigterm_drain_stream": Outcome.COMPLETE,
    "sigterm_messages_stream": Outcome.UPSTREAM_TRUNCATED,
    "sigterm_queued_completions_stream": Outcome.STREAM_ERROR,
    "sigterm_queued_messages_stream": Outcome.STREAM_ERROR,
    "sigterm_queued_nonstream": Outcome.STREAM_ERROR,
    "sigterm_queued_responses_stream": Outcome.EMPTY,
    "sigterm_queued_stream": Outcome.STREAM_ERROR,
    "sigterm_responses_stream": Outcome.UPSTREAM_TRUNCATED,
    "sigterm_stream": Outcome.UPSTREAM_TRUNCATED,
}


def test_failures_recorded() -> None:
    seen = {}
    for name, recording in RECORDED.items():
        dialect = dialects.for_path(recording.path)
        if name.startswith("fail/") and dialect is not None:
            meter = Meter(dialect, EDGES, streamed=recording.chunked)
            for at, piece in enumerate(recording.pieces):
                meter.feed(piece, at)
            meter.end()
            seen[name.removeprefix("fail/")] = meter.verdict(recording.complete)
    assert seen == FAILED


def test_a_slow_reader_gets_long_events() -> None:
    path, _, pieces, _ = RECORDED["slow/slow_reader_logprobs_40s"]
    assert path == "/v1/chat/completions" and max(map(len, pieces)) > 400_000
    meter = metered(chat, enumerate(pieces))
    assert not meter.opaque and meter.verdict(True) is Outcome.COMPLETE and meter.output_tokens > meter.events


def test_ten_thousand_events_in_one_read() -> None:
    """Cheap, and not quadratic, whatever they are: bounds that only what is quadratic can miss."""
    began = time.process_time()
    for other in (b"", token('"'), b": c\n\n", token("c").replace(b"\n", b"\r\n"), token("x", usage=(1, 2))):
        meter = metered(chat, [(1, ROLE), (2, (token("a") + other) * 10_000)])
        assert meter.events >= 10_000 and meter.reads == 1
    assert time.process_time() - began < 10
