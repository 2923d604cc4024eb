"""The acceptance cases of the metrics, over real sockets: counts, sources and outcomes exact, times those of the wire.

The upstream writes down when it sent what, by the clock that the tester reads. A busy machine makes it late, and both see
that; what the tester may add is the way through the kernel and its own event loop.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.core.outcome import Outcome
from gateway.loadtest.datasets import Prompt
from gateway.loadtest.endpoints import Kind
from gateway.loadtest.records import Record, Run, Watch
from gateway.loadtest.results import Measured, as_json
from gateway.loadtest.statistics import check_tester, measure, success_rule
from tests.core.test_meter import MORE
from tests.loadtest.support import client, settings
from tests.support.messages import HttpWire, Message
from tests.support.script import LAST, chunk, head
from tests.support.upstream import running

KINDS = {
    "chat.completions": Kind.CHAT,
    "chat": Kind.CHAT,
    "completions": Kind.COMPLETIONS,
    "responses": Kind.RESPONSES,
    "anthropic.messages": Kind.MESSAGES,
    "messages": Kind.MESSAGES,
}
OUTCOMES = {
    "ok": Outcome.COMPLETE,
    "empty": Outcome.EMPTY,
    "stream_error": Outcome.STREAM_ERROR,
    "truncated": Outcome.UPSTREAM_TRUNCATED,
    "upstream_reset": Outcome.UPSTREAM_RESET,
}
SSE = "text/event-stream; charset=utf-8"


def all_cases() -> dict[str, dict[str, Any]]:
    """Those of the data file, and those that the meter's tests add to it."""
    held = json.loads((Path(__file__).parents[1] / "data" / "metrics_cases.json").read_text())["cases"]
    cases = {
        str(case["id"]): {
            "kind": KINDS[case["dialect"]],
            "timed": [(segment["t_ms"], base64.b64decode(segment["b64"])) for segment in case["segments"]],
            "type": case["content_type"],
            "reset": case["reset_at_ms"],
            "expected": case["expected"],
        }
        for case in held
    }
    for name, (dialect, timed, expected) in MORE.items():
        cases[name] = {"kind": KINDS[dialect.name], "timed": timed, "type": SSE, "reset": None, "expected": expected}
    return cases


CASES = all_cases()


class Player:
    """A script that plays the case that the prompt names, and writes down when each millisecond of it was sent."""

    def __init__(self) -> None:
        self.sent: dict[str, dict[int, float]] = {}

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        name = named(json.loads(request.body))
        case, began = CASES[name], time.monotonic()
        sent = self.sent[name] = {}
        await wire.send(head(200, [("content-type", case["type"]), ("transfer-encoding", "chunked")]))
        for at, octets in case["timed"]:
            await asyncio.sleep(began + at / 1e3 - time.monotonic())
            sent[at] = time.monotonic()
            if octets:
                await wire.send(chunk(octets))
        if case["reset"] is not None:
            await asyncio.sleep(began + case["reset"] / 1e3 - time.monotonic())
            wire.reset()
        else:
            await wire.send(LAST)


def named(body: dict[str, Any]) -> str:
    said = body.get("prompt") or body.get("input") or body["messages"][0]["content"]
    assert isinstance(said, str)
    return said


@pytest.fixture(scope="module")
def played() -> tuple[dict[str, Record], dict[str, dict[int, float]]]:
    """All cases, at the same time: the record of each, with absolute times, and when its parts were sent."""

    async def play() -> tuple[dict[str, Record], dict[str, dict[int, float]]]:
        player, records = Player(), {name: Record(index, 0.0) for index, name in enumerate(CASES)}
        async with running(player) as upstream:
            clients = {kind: client(upstream.url, kind) for kind in Kind}
            await asyncio.gather(
                *(clients[CASES[name]["kind"]].ask(Prompt(name, 1, 9), record, 0.0, None) for name, record in records.items())
            )
            for each in clients.values():
                each.close()
        return records, player.sent

    return asyncio.run(play())


def output_times(expected: dict[str, Any]) -> list[int]:
    """When output was sent, in milliseconds; not known where several choices came through one another."""
    if expected["ttft_ms"] is None or expected["itl_ms"] is None:
        return []
    times = [expected["ttft_ms"]]
    for gap in expected["itl_ms"]:
        times.append(times[-1] + gap)
    return times


@pytest.mark.parametrize("name", CASES)
def test_counts_and_outcome(played: tuple[dict[str, Record], Any], name: str) -> None:
    expected, record = CASES[name]["expected"], played[0][name]
    assert record.outcome is OUTCOMES[expected.get("outcome", "ok")], record.error
    assert (record.error == "") is (record.outcome is Outcome.COMPLETE)
    assert record.output_tokens == expected["output_tokens"]
    assert record.token_source == expected["token_source"]
    assert (record.tpot is None) is (expected.get("tpot_ms") is None)
    assert len(record.events) == (6 if name == "24" else len(output_times(expected)))
    assert (record.first_visible is None) is (expected.get("ttfv_ms", expected["ttft_ms"]) is None)
    assert record.status == 200


@pytest.mark.parametrize("name", CASES)
def test_no_time_is_before_it_was_sent(played: tuple[dict[str, Record], dict[str, dict[int, float]]], name: str) -> None:
    records, sent = played
    for at, received in zip(output_times(CASES[name]["expected"]), records[name].events, strict=False):
        assert received >= sent[name][at]


def test_times_are_right_within_2_ms(played: tuple[dict[str, Record], dict[str, dict[int, float]]]) -> None:
    """At the median, over all output events and all ends of all cases."""
    records, sent = played
    errors = []
    for name, record in records.items():
        expected = CASES[name]["expected"]
        errors += [received - sent[name][at] for at, received in zip(output_times(expected), record.events, strict=False)]
        if record.outcome is Outcome.COMPLETE:
            errors.append(record.ended - sent[name][CASES[name]["timed"][-1][0]])
    assert len(errors) > 100
    assert 0 <= statistics.median(errors) < 0.002


def test_tpot_as_vllm_has_it_and_as_we_do(played: tuple[dict[str, Record], Any]) -> None:
    """Case 5: the first event holds 4 of 8 tokens. (380 - 300) / 7 = 11.43 is vLLM's, (380 - 300) / 4 = 20 is ours."""
    record = played[0]["5"]
    given, strict = settings(), success_rule("strict", Kind.CHAT)
    run = Run(1.0, 1, [[record]], Any, 1.0, Watch([0.0], 0.0, 1.0))  # type: ignore[arg-type]
    metrics = measure([record], 1.0, strict, (50,))
    from datetime import UTC, datetime

    run.began = datetime.now(UTC)
    result = as_json(given, "m", Measured(run, (metrics,), strict, check_tester(run)))
    span = (record.events[-1] - record.events[0]) * 1e3
    assert result["mean_tpot_ms"] == pytest.approx(span / 7)
    assert result["tokenpipe"]["mean_tpot_adjusted_ms"] == pytest.approx(span / 4)
    assert result["tokenpipe"]["output_token_sources"] == {"usage": 8}
