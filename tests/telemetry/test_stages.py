"""Where the time of a request went: each part is told from its own marks, and what is left is the gateway's."""

from __future__ import annotations

import pytest

from gateway.core.outcome import Outcome, Phase
from gateway.telemetry.series import fault
from tests.telemetry.fakes import ACCEPTED, FakeMeter, House, ended, refused, stream
from tests.telemetry.test_metrics import scrape, total, value

PAIR = {"model": "llama", "backend": "b1"}


def test_the_split_of_a_stream() -> None:
    metrics = House().metrics()
    metrics.ended(ended(stream()))
    samples = scrape(metrics)
    for name, seconds in {
        "queue_seconds": 0.02, "connect_seconds": 0.002, "response_head_seconds": 0.266, "first_event_seconds": 0.1,
        "upstream_time_to_first_token_seconds": 0.366, "time_to_first_token_seconds": 0.5,
    }.items():  # fmt: skip
        assert value(samples, f"{name}_sum", **PAIR) == pytest.approx(seconds), name
        assert value(samples, f"{name}_count", **PAIR) == 1
    assert value(samples, "body_seconds_sum") == pytest.approx(0.01)
    assert value(samples, "pick_seconds_sum") == pytest.approx(0.0002)
    # head parsed to a backend picked is 31.2 ms, of which 10 were the body's and 20 the queue's
    assert value(samples, "overhead_seconds_sum", stage="request") == pytest.approx(0.0012)
    assert value(samples, "overhead_seconds_sum", stage="first_event") == pytest.approx(0.1)


def test_who_is_admitted_at_once_waited_for_nothing() -> None:
    metrics = House().metrics()
    metrics.ended(ended(stream(queued=None, selected=ACCEPTED + 0.011, connect_began=ACCEPTED + 0.0115)))
    samples = scrape(metrics)
    assert value(samples, "queue_seconds_bucket", **PAIR, le="0.0001") == 1
    assert value(samples, "queue_seconds_sum", **PAIR) == 0
    assert value(samples, "overhead_seconds_sum", stage="request") == pytest.approx(0.0015)


def test_of_a_second_attempt_there_is_no_telling() -> None:
    metrics = House().metrics()
    metrics.ended(ended(stream(attempts=2)))
    metrics.ended(refused())
    samples = scrape(metrics)
    assert value(samples, "pick_seconds_count") == 0
    assert value(samples, "overhead_seconds_count", stage="request") == 0
    assert value(samples, "connect_seconds_count", **PAIR) == 1
    assert total(samples, "response_head_seconds_count") == 1


def test_a_first_event_that_came_with_the_head() -> None:
    metrics = House().metrics()
    metrics.ended(ended(stream(FakeMeter(first_output=ACCEPTED + 0.25))))
    samples = scrape(metrics)
    assert value(samples, "first_event_seconds_sum", **PAIR) == 0
    assert value(samples, "first_event_seconds_count", **PAIR) == 1


def test_a_running_stream_has_its_first_event_counted_once() -> None:
    house = House()
    metrics = house.metrics()
    house.live.append(stream())
    for _ in range(2):
        assert value(scrape(metrics), "upstream_time_to_first_token_seconds_count", **PAIR) == 1
    metrics.ended(ended(house.live.pop()))
    samples = scrape(metrics)
    assert value(samples, "upstream_time_to_first_token_seconds_count", **PAIR) == 1
    assert value(samples, "overhead_seconds_count", stage="first_event") == 1


def test_events_reads_and_the_longest_gap() -> None:
    metrics = House().metrics()
    metrics.ended(ended(stream(FakeMeter([0.02, 0.7], events=3, reads=2, cached_tokens=5))))
    metrics.ended(ended(stream(FakeMeter(opaque=True))))
    samples = scrape(metrics)
    assert value(samples, "stream_max_gap_seconds_sum", **PAIR) == pytest.approx(0.7)
    assert value(samples, "stream_max_gap_seconds_count", **PAIR) == 1
    assert value(samples, "stream_events_total", **PAIR) == 4
    assert value(samples, "stream_reads_total", **PAIR) == 3
    assert value(samples, "cached_prompt_tokens_total", **PAIR) == 5
    assert value(samples, "opaque_streams_total", **PAIR) == 1


def test_streams_that_never_got_a_token() -> None:
    """They are in no histogram of the first token, which a hung engine would make look better."""
    metrics = House().metrics()
    silent = {"first_output_written": None, "phase": Phase.FIRST_TOKEN}
    metrics.ended(ended(stream(**silent), Outcome.TIMEOUT_IDLE))
    metrics.ended(ended(stream(**silent), Outcome.CLIENT_GONE))
    metrics.ended(ended(stream(), Outcome.UPSTREAM_RESET))  # this one did
    metrics.ended(ended(stream(**silent, stream=False), Outcome.TIMEOUT_IDLE))  # and this one asked for none
    samples = scrape(metrics)
    assert value(samples, "no_first_token_total", **PAIR, fault="service") == 1
    assert value(samples, "no_first_token_total", **PAIR, fault="client") == 1
    assert value(samples, "abandoned_seconds_sum", **PAIR) == 2
    assert value(samples, "abandoned_seconds_count", **PAIR) == 1
    assert value(samples, "time_to_first_token_seconds_count", **PAIR) == 1


def test_an_objective_begins_at_zero() -> None:
    """What a `rate()` is taken of has to be there before the first of it."""
    house = House()
    metrics = house.metrics()
    house.live.append(stream(first_output_written=None))
    samples = scrape(metrics)
    assert value(samples, "time_to_first_token_seconds_bucket", **PAIR, le="2.0") == 0
    assert value(samples, "no_first_token_total", **PAIR, fault="service") == 0


@pytest.mark.parametrize(
    ("outcome", "code", "whose"),
    [
        (Outcome.CLIENT_GONE, 200, "client"),
        (Outcome.CLIENT_STALLED, 200, "client"),
        (Outcome.REFUSED, "bad_request", "client"),
        (Outcome.REFUSED, "rate_limited", "client"),
        (Outcome.REFUSED, "queue_full", "service"),
        (Outcome.REFUSED, "no_backend", "service"),
        (Outcome.UPSTREAM_STATUS, 400, "client"),
        (Outcome.UPSTREAM_STATUS, "4xx", "client"),
        (Outcome.UPSTREAM_STATUS, 429, "service"),
        (Outcome.UPSTREAM_STATUS, 500, "service"),
        (Outcome.UPSTREAM_STATUS, "5xx", "service"),
        (Outcome.EMPTY, 200, "service"),
        (Outcome.TIMEOUT_FIRST_BYTE, "timeout_first_byte", "service"),
        (Outcome.DRAINING, 200, "service"),
        (Outcome.INTERNAL, "internal", "service"),
    ],
)
def test_whose_fault(outcome: Outcome, code: str | int, whose: str) -> None:
    assert fault(outcome, code) == whose
