"""What the live page shows, computed from exchanges and looks at them."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from gateway.control.dashboard_sample import STREAMS_MOST, TEXT_MOST, WINDOW, Sampler, Sketch
from gateway.core.exchange import Exchange
from gateway.core.outcome import Outcome, Phase
from tests.telemetry.fakes import ACCEPTED, FakeMeter, ended, stream

BEGAN = ACCEPTED - 1


def point(sampler: Sampler, now: float) -> dict[str, Any]:
    return sampler.point(now, 1_800_000_000 + now)[0]


def meter(tokens: int, **fields: Any) -> FakeMeter:
    return FakeMeter(output_tokens=tokens, **fields)


# ---- quantiles ----


def test_quantiles_are_right_within_two_percent() -> None:
    rng = random.Random(3)
    values = [rng.lognormvariate(-2, 1.5) for _ in range(5000)]
    sketches = [Sketch() for _ in range(7)]
    for number, value in enumerate(values):
        sketches[number % 7].add(value)
    exact = statistics.quantiles(values, n=100, method="inclusive")
    found = Sketch.quantiles(sketches, 0.5, 0.95, 0.99)
    assert found == pytest.approx([exact[49], exact[94], exact[98]], rel=0.03)


def test_quantiles_of_odd_values() -> None:
    """What is no duration takes a place at an edge, and no memory beyond the buckets."""
    sketch = Sketch()
    for value in (-1.0, 0.0, 1e-12, 1e300):
        sketch.add(value)
    assert len(sketch.counts) == 2
    assert Sketch.quantiles([], 0.5) is None
    assert Sketch.quantiles([Sketch()], 0.5) is None


# ---- what is counted ----


def test_tokens_are_counted_as_they_come() -> None:
    sampler, exchange = Sampler(BEGAN), stream(meter(10))
    sampler.look(exchange, ACCEPTED + 1)
    assert point(sampler, ACCEPTED + 1)["tokens"] == 5  # ten, over the two seconds since the sampling began
    exchange.meter.output_tokens = 50  # type: ignore[misc, union-attr]
    sampler.look(exchange, ACCEPTED + 2)
    shown, by_backend = sampler.point(ACCEPTED + 2, 0)
    assert (shown["tokens"], by_backend) == (40, {"b1": 40})
    exchange.meter.output_tokens = 65  # type: ignore[misc, union-attr]
    sampler.ended(ended(exchange))
    assert point(sampler, ACCEPTED + 3)["tokens"] == 15
    assert point(sampler, ACCEPTED + 4)["tokens"] == 0


def test_what_came_and_went_between_two_looks() -> None:
    sampler = Sampler(BEGAN)
    sampler.ended(ended(stream(meter(7))))
    shown = point(sampler, ACCEPTED + 1)
    assert (shown["tokens"], shown["ended"], shown["in_flight"]) == (3.5, {"complete": 1}, 0)
    assert shown["ttft"] == pytest.approx([0.5, 0.5], rel=0.02)


def test_the_past_is_not_counted() -> None:
    """Of a stream that was under way before anybody looked, neither its tokens nor its TTFT."""
    sampler = Sampler(ACCEPTED + 1)
    looked_at, unseen = stream(meter(1000)), stream(meter(500))
    sampler.look(looked_at, ACCEPTED + 1)
    sampler.ended(ended(unseen))
    shown = point(sampler, ACCEPTED + 2)
    assert (shown["tokens"], shown["ttft"], shown["ended"]) == (0, None, {"complete": 1})
    looked_at.meter.output_tokens = 1010  # type: ignore[misc, union-attr]
    sampler.look(looked_at, ACCEPTED + 3)
    assert point(sampler, ACCEPTED + 3)["tokens"] == 10


def test_a_first_token_that_came_while_somebody_looked() -> None:
    """TTFT is told when it is known, not when the stream ends; and once."""
    sampler, exchange = Sampler(ACCEPTED + 0.1), stream(meter(0), first_output_written=None)
    sampler.look(exchange, ACCEPTED + 0.2)
    assert point(sampler, ACCEPTED + 0.2)["ttft"] is None
    exchange.first_output_written = ACCEPTED + 0.5
    sampler.look(exchange, ACCEPTED + 1)
    assert point(sampler, ACCEPTED + 1)["ttft"] == pytest.approx([0.5, 0.5], rel=0.02)
    sampler.ended(ended(exchange))
    assert sum(sum(sketch.counts.values()) for sketch in sampler._ttft) == 1


def test_a_quantile_is_forgotten_after_the_window() -> None:
    sampler = Sampler(BEGAN)
    sampler.ended(ended(stream(meter(7, tpot=0.02))))
    shown = [point(sampler, ACCEPTED + number) for number in range(WINDOW + 1)]
    assert all(p["tpot"] == pytest.approx([0.02, 0.02], rel=0.02) for p in shown[:WINDOW])
    assert shown[WINDOW]["tpot"] is None


def test_a_broken_stream_has_no_tpot() -> None:
    sampler = Sampler(BEGAN)
    sampler.ended(ended(stream(meter(7, tpot=0.02)), Outcome.UPSTREAM_RESET))
    shown = point(sampler, ACCEPTED + 3)
    assert (shown["tpot"], shown["ended"]) == (None, {"upstream_reset": 1})


def test_nothing_of_an_exchange_is_kept_after_its_end() -> None:
    sampler, exchange = Sampler(BEGAN), stream()
    sampler.look(exchange, ACCEPTED + 1)
    sampler.ended(ended(exchange))
    sampler.look(exchange, ACCEPTED + 2)  # the look was on its way to it when it ended
    assert not sampler._seen
    assert not sampler.rows[1:]


# ---- what is shown of one stream ----


def row(exchange: Exchange, *looks: float) -> dict[str, Any]:
    sampler = Sampler(BEGAN)
    for now in looks or (ACCEPTED + 2,):
        sampler.point(now, 0)
        sampler.look(exchange, now)
    return sampler.rows[0]


def test_a_row() -> None:
    assert row(stream(FakeMeter(output_tokens=33, last_output=ACCEPTED + 1.5))) == {
        "request_id": "req-1", "client": "10.1.2.3:4567", "method": "POST", "path": "/v1/chat/completions",
        "model": "llama", "backend": "b1", "phase": "stream", "age_s": 2.0, "tokens": 33, "tokens_per_s": 20.0,
        "silent_s": 0.5, "bytes_out": 900, "paused": False, "held_back_s": 0.0,
    }  # fmt: skip


def test_pace_forgets() -> None:
    """A stream that stops has next to no pace ten seconds later."""
    exchange = stream(FakeMeter(output_tokens=41, first_output=ACCEPTED))
    assert row(exchange, ACCEPTED + 2)["tokens_per_s"] == 20
    assert row(exchange, ACCEPTED + 2, ACCEPTED + 3)["tokens_per_s"] == pytest.approx(20 * 0.607, abs=0.1)
    assert row(exchange, *(ACCEPTED + second for second in range(2, 13)))["tokens_per_s"] < 0.2


def test_no_token_yet() -> None:
    waiting = stream(FakeMeter(output_tokens=0, first_output=None, last_output=None), phase=Phase.FIRST_TOKEN)
    shown = row(waiting)
    assert (shown["tokens"], shown["tokens_per_s"], shown["silent_s"]) == (0, None, None)
    unmetered = stream(phase=Phase.WAIT)
    unmetered.meter = None
    assert row(unmetered)["tokens"] is None


def test_back_pressure() -> None:
    """How long it was held back in all, the pause that still lasts included."""
    shown = row(stream(paused_at=ACCEPTED + 1, paused_seconds=3.0))
    assert (shown["paused"], shown["held_back_s"]) == (True, 4.0)
    shown = row(stream(paused_seconds=3.0))
    assert (shown["paused"], shown["held_back_s"]) == (False, 3.0)


def test_waiting_is_what_has_no_token_yet() -> None:
    sampler = Sampler(BEGAN)
    for phase in Phase:
        sampler.look(stream(phase=phase), ACCEPTED + 1)
    shown = point(sampler, ACCEPTED + 1)
    assert (shown["in_flight"], shown["waiting"]) == (8, 6)


def test_what_is_told_is_bounded() -> None:
    """However many streams, and however long their texts: the first so many, cut; all are counted."""
    sampler = Sampler(BEGAN)
    exchanges = [stream(path="/" + "x" * 60000, model="y" * 60000, request_id=str(n)) for n in range(STREAMS_MOST + 50)]
    for exchange in exchanges:
        sampler.look(exchange, ACCEPTED + 1)
    assert [shown["request_id"] for shown in sampler.rows] == [str(n) for n in range(STREAMS_MOST)]
    assert sampler.phases.total() == STREAMS_MOST + 50
    assert all(len(text) <= TEXT_MOST for shown in sampler.rows for text in shown.values() if isinstance(text, str))
