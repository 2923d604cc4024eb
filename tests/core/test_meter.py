"""The meter: the acceptance cases on a virtual clock, every split of them, how streams end, times and counts.

Times are milliseconds in whole numbers, so that sums and gaps are exact.
"""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.dialects import Dialect, chat, completions, messages, responses
from gateway.core.meter import Meter
from gateway.core.outcome import Outcome
from gateway.core.sse import LIMIT
from tests.support.metering import (
    DONE,
    EDGES,
    ERROR,
    ROLE,
    START,
    Timed,
    chunk,
    counted,
    gaps,
    metered,
    sse,
    token,
    total,
    totals,
    unstreamed,
)

TESTS = Path(__file__).parents[1]

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
    octets = token('"' + "x" * LIMIT)
    for pieces in ([octets], [octets[:LIMIT], octets[LIMIT:]], [octets + token("b")]):
        meter = Meter(chat, EDGES, streamed=True)
        meter.feed(START + token("b"), 1)
        assert meter.shape is not None
        for piece in [*pieces, token("a") + DONE]:
            meter.feed(piece, 2)
        assert meter.opaque and meter.events == 2 and not meter.at_boundary and meter.shape is None
        meter.end()
        assert meter.opaque and meter.events == 2 and not meter.at_boundary and meter.shape is None
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
    meter = metered(chat, [(1, token("a", usage=(7, 4)) + token("b", usage=(7, 2)) + token("c", index=1, usage=(7, 3)))])
    assert (meter.output_tokens, meter.token_source, meter.prompt_tokens, meter.k_first) == (7, "continuous", 7, 4)


def test_token_ids() -> None:
    def ids(*ids: int) -> bytes:
        return sse({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": ids}]})

    meter = metered(chat, [(1, ROLE + ids(1, 2)), (3, ids(3)), (7, ids(4, 5, 6) + chunk({}, "stop") + DONE)])
    assert (meter.output_tokens, meter.token_source, meter.k_first, meter.tpot) == (6, "token_ids", 2, 1.5)
