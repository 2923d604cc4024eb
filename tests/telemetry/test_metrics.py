from __future__ import annotations

import shutil
import subprocess
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.core.dialects import for_path
from gateway.core.meter import Meter
from gateway.core.outcome import Outcome, Phase
from gateway.telemetry import metrics as module
from gateway.telemetry.histogram import B_TPOT
from gateway.telemetry.metrics import BackendSample, Metrics
from gateway.telemetry.page import OPENMETRICS, TEXT, wants_openmetrics
from tests.telemetry.fakes import ACCEPTED, FakeMeter, House, ended, refused, stream

PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

# interface.md section 6, with its labels
PROMISED = {
    "requests_total": {"model", "backend", "outcome", "code"},
    "requests_in_flight": {"model", "backend", "phase"},
    "time_to_first_token_seconds": {"model", "backend"},
    "time_per_output_token_seconds": {"model", "backend", "source"},
    "inter_token_latency_seconds": {"model", "backend"},
    "request_duration_seconds": {"model", "backend", "outcome"},
    "time_to_first_byte_seconds": {"model", "backend"},
    "queue_seconds": {"model", "backend"},
    "connect_seconds": {"model", "backend"},
    "prompt_tokens_total": {"model", "backend", "source"},
    "output_tokens_total": {"model", "backend", "source"},
    "client_aborts_total": {"phase"},
    "abort_seconds": set(),
    "backpressure_pauses_total": {"backend"},
    "backpressure_seconds_total": {"backend"},
    "write_buffer_bytes": set(),
    "queue_depth": set(),
    "relayed_bytes_total": {"direction"},
    "backend_up": {"backend"},
    "backend_state": {"backend", "state"},
    "backend_failures_total": {"backend", "reason"},
    "upstream_connections": {"backend"},
    "upstream_connections_reused_total": {"backend"},
    "retries_total": {"reason"},
    "event_loop_lag_seconds": set(),
    "config_reloads_total": {"result"},
    "config_last_reload_success_timestamp_seconds": set(),
    "build_info": {"version", "python"},
    "hedges_total": {"result"},
    "migrations_total": {"reason"},
    # metrics.md 3.1
    "upstream_time_to_first_token_seconds": {"model", "backend"},
    "response_head_seconds": {"model", "backend"},
    "first_event_seconds": {"model", "backend"},
    "stream_max_gap_seconds": {"model", "backend"},
    "abandoned_seconds": {"model", "backend"},
    "no_first_token_total": {"model", "backend", "fault"},
    "finish_reasons_total": {"model", "backend", "reason"},
    "cached_prompt_tokens_total": {"model", "backend"},
    "stream_events_total": {"model", "backend"},
    "stream_reads_total": {"model", "backend"},
    "opaque_streams_total": {"model", "backend"},
    "body_seconds": set(),
    "pick_seconds": set(),
    "overhead_seconds": {"stage"},
    "tpot_skipped_total": {"reason"},
    "backend_in_flight": {"backend"},
    "panic_picks_total": {"backend"},
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: Metrics) -> Samples:
    pieces, _ = metrics.render(None)
    body = b"".join(pieces)
    families = parse_text(body.decode())
    return {
        (sample.name.removeprefix("tokenpipe_"), frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def total(samples: Samples, name: str) -> float:
    return sum(number for (each, _), number in samples.items() if each == name)


def busy_house() -> tuple[House, Metrics]:
    """A house in which everything has happened once."""
    house = House()
    metrics = house.metrics()
    done = stream(FakeMeter([0.02, 0.03], tpot=0.025, events=3, output_tokens=3))
    metrics.connection("b1", reused=True)
    metrics.connection("b1", reused=False)
    metrics.retried(done, "upstream_connect")
    metrics.hedged(done, "won")
    metrics.migrated(done, "upstream_reset")
    metrics.failed(done, "upstream_connect")
    metrics.paused(done)
    metrics.resumed(done, 0.25)
    metrics.ended(ended(done))
    gone = stream()
    metrics.ended(ended(gone, Outcome.CLIENT_GONE))
    metrics.aborted(gone, 0.0004)
    metrics.ended(ended(stream(first_output_written=None), Outcome.CLIENT_GONE))
    metrics.ended(refused())
    metrics.loop_lag(0.002)
    metrics.reloaded(success=False)
    house.live.append(stream(FakeMeter([0.01])))
    return house, metrics


def test_every_promised_name_is_there_with_its_labels() -> None:
    _, metrics = busy_house()
    samples = scrape(metrics)
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        labels.setdefault(base, set()).update(key for key, _ in pairs if key != "le")
    assert {name: labels.get(name) for name in PROMISED} == PROMISED
    assert "process_resident_memory_bytes" in labels
    assert not [name for name in labels if name.endswith("_created")]


def test_a_complete_stream() -> None:
    metrics = House().metrics()
    metrics.ended(ended(stream(FakeMeter([0.02, 0.03], tpot=0.025, output_tokens=3))))
    samples = scrape(metrics)
    pair = {"model": "llama", "backend": "b1"}
    assert value(samples, "requests_total", **pair, outcome="complete", code="200") == 1
    assert value(samples, "time_to_first_token_seconds_sum", **pair) == pytest.approx(0.5)
    assert value(samples, "time_to_first_token_seconds_bucket", **pair, le="0.5") == 1
    assert value(samples, "time_to_first_token_seconds_bucket", **pair, le="0.4") == 0
    assert value(samples, "time_per_output_token_seconds_sum", **pair, source="usage") == pytest.approx(0.025)
    assert value(samples, "inter_token_latency_seconds_count", **pair) == 2
    assert value(samples, "inter_token_latency_seconds_sum", **pair) == pytest.approx(0.05)
    assert value(samples, "request_duration_seconds_sum", **pair, outcome="complete") == pytest.approx(2)
    assert value(samples, "time_to_first_byte_seconds_sum", **pair) == pytest.approx(0.31)
    assert value(samples, "queue_seconds_sum", **pair) == pytest.approx(0.02)
    assert value(samples, "connect_seconds_sum", **pair) == pytest.approx(0.002)
    assert value(samples, "prompt_tokens_total", **pair, source="usage") == 7
    assert value(samples, "output_tokens_total", **pair, source="usage") == 3
    assert value(samples, "finish_reasons_total", **pair, reason="stop") == 1
    assert value(samples, "relayed_bytes_total", direction="in") == 120
    assert value(samples, "relayed_bytes_total", direction="out") == 900


def test_what_was_not_measured_is_not_observed() -> None:
    metrics = House().metrics()
    metrics.ended(refused())
    metrics.ended(ended(stream(stream=False)))  # in one piece: no first token to be seen
    samples = scrape(metrics)
    assert value(samples, "requests_total", model="other", backend="none", outcome="refused", code="unknown_model") == 1
    for name in ("time_to_first_token", "time_per_output_token", "inter_token_latency"):
        assert total(samples, f"{name}_seconds_count") == 0
    assert total(samples, "tpot_skipped_total") == 0
    assert total(samples, "request_duration_seconds_count") == 2


def test_a_stream_that_broke_off_has_a_ttft_but_no_tpot() -> None:
    metrics = House().metrics()
    metrics.ended(ended(stream(FakeMeter(tpot=0.02, tpot_skipped=None)), Outcome.UPSTREAM_RESET))
    metrics.ended(ended(stream(FakeMeter(tpot=0.02, token_source="events", tpot_skipped="estimated"))))
    metrics.ended(ended(stream(FakeMeter(tpot_skipped="single_read"))))
    samples = scrape(metrics)
    assert total(samples, "time_to_first_token_seconds_count") == 3
    assert value(samples, "tpot_skipped_total", reason="not_ok") == 1
    assert value(samples, "tpot_skipped_total", reason="single_read") == 1
    assert total(samples, "tpot_skipped_total") == 2
    assert value(samples, "time_per_output_token_seconds_count", model="llama", backend="b1", source="events") == 1


def test_a_running_stream_is_seen_and_counted_once() -> None:
    house = House()
    metrics = house.metrics()
    meter = FakeMeter([0.02])
    exchange = stream(meter, first_output_written=None, phase=Phase.FIRST_TOKEN, bytes_out=0)
    house.live.append(exchange)
    pair = {"model": "llama", "backend": "b1"}
    samples = scrape(metrics)
    assert value(samples, "requests_in_flight", **pair, phase="first_token") == 1
    assert total(samples, "time_to_first_token_seconds_count") == 0

    exchange.phase, exchange.first_output_written, exchange.bytes_out = Phase.STREAM, ACCEPTED + 0.5, 400
    meter.gaps = [0.03]
    for _ in range(2):
        samples = scrape(metrics)
        assert value(samples, "requests_in_flight", **pair, phase="first_token") == 0
        assert value(samples, "requests_in_flight", **pair, phase="stream") == 1
        assert value(samples, "time_to_first_token_seconds_count", **pair) == 1
        assert value(samples, "inter_token_latency_seconds_count", **pair) == 2
        assert value(samples, "relayed_bytes_total", direction="out") == 400

    exchange.bytes_out = 1000
    meter.gaps = [0.04]
    metrics.ended(ended(exchange))
    for _ in range(2):  # still listed as live, for a moment: that must not count twice either
        samples = scrape(metrics)
        assert value(samples, "requests_in_flight", **pair, phase="stream") == 0
        assert value(samples, "time_to_first_token_seconds_count", **pair) == 1
        assert value(samples, "inter_token_latency_seconds_count", **pair) == 3
        assert value(samples, "relayed_bytes_total", direction="in") == 120
        assert value(samples, "relayed_bytes_total", direction="out") == 1000
        house.live.clear()


def test_who_was_never_met_in_flight_is_shown_with_none() -> None:
    """A panel is not empty because no scrape has come while a request was under way."""
    metrics = House().metrics()
    metrics.ended(ended(stream()))
    samples = scrape(metrics)
    assert {value(samples, "requests_in_flight", model="llama", backend="b1", phase=phase) for phase in Phase} == {0}


def test_a_client_that_left() -> None:
    metrics = House().metrics()
    exchange = stream(phase=Phase.FIRST_TOKEN)
    metrics.ended(ended(exchange, Outcome.CLIENT_GONE))
    metrics.aborted(exchange, 0.0004)
    samples = scrape(metrics)
    assert value(samples, "client_aborts_total", phase="first_token") == 1
    assert value(samples, "abort_seconds_bucket", le="0.0005") == 1


def test_back_pressure_counts_a_pause_that_never_ended() -> None:
    metrics = House().metrics()
    exchange = stream()
    metrics.paused(exchange)
    metrics.resumed(exchange, 0.25)
    metrics.paused(exchange)
    exchange.paused_at = ACCEPTED + 1
    metrics.ended(ended(exchange, Outcome.CLIENT_STALLED))
    samples = scrape(metrics)
    assert value(samples, "backpressure_pauses_total", backend="b1") == 2
    assert value(samples, "backpressure_seconds_total", backend="b1") == pytest.approx(1.25)


def test_backends() -> None:
    house = House()
    metrics = house.metrics()
    metrics.connection("b1", reused=True)
    metrics.connection("b1", reused=False)
    metrics.failed(stream(), "upstream_reset")
    metrics.retried(stream(), "upstream_reset")
    samples = scrape(metrics)
    assert value(samples, "backend_up", backend="b1") == 1
    assert value(samples, "backend_up", backend="b2") == 0
    assert value(samples, "backend_state", backend="b2", state="down") == 1
    assert value(samples, "backend_state", backend="b2", state="up") == 0
    assert value(samples, "backend_in_flight", backend="b1") == 3
    assert value(samples, "upstream_connections", backend="b1") == 5
    assert value(samples, "upstream_connections_reused_total", backend="b1") == 1
    assert value(samples, "upstream_connections_reused_total", backend="b2") == 0  # there before anything happened
    assert value(samples, "backend_failures_total", backend="b1", reason="upstream_reset") == 1
    assert value(samples, "retries_total", reason="upstream_reset") == 1
    assert value(samples, "queue_depth") == 4
    assert value(samples, "write_buffer_bytes") == 65536


def test_reloads() -> None:
    times = iter([10.0, 20.0])
    metrics = Metrics(House().sources(), wall=lambda: next(times), version="1")
    samples = scrape(metrics)
    assert value(samples, "config_reloads_total", result="failure") == 0
    assert value(samples, "config_last_reload_success_timestamp_seconds") == 10
    metrics.reloaded(success=False)
    metrics.reloaded(success=True)
    samples = scrape(metrics)
    assert value(samples, "config_reloads_total", result="failure") == 1
    assert value(samples, "config_reloads_total", result="success") == 1
    assert value(samples, "config_last_reload_success_timestamp_seconds") == 20


def test_clients_make_no_label() -> None:
    house = House()
    metrics = house.metrics()
    for number in range(300):
        metrics.ended(refused(model=f"made-up-{number}"))
        metrics.ended(ended(stream(model=f"made-up-{number}", status=600 + number)))
        metrics.ended(ended(stream(FakeMeter(finish_reason=f"made-up-{number}")), code=f"made-up-{number}"))
        metrics.retried(stream(), f"made-up-{number}")
        house.live.append(stream(model=f"live-made-up-{number}"))
    samples = scrape(metrics)
    assert {dict(pairs)["model"] for name, pairs in samples if name == "requests_total"} == {"other", "llama"}
    assert {dict(pairs)["code"] for name, pairs in samples if name == "requests_total"} == {"other", "unknown_model"}
    assert {dict(pairs)["reason"] for name, pairs in samples if name == "finish_reasons_total"} == {"stop", "other"}
    assert value(samples, "requests_in_flight", model="other", backend="b1", phase="stream") == 300
    assert len([name for name, _ in samples if name == "retries_total"]) <= module.MAX_WORDS + 1
    assert len(metrics._cache) <= 4


@pytest.mark.parametrize(("status", "code"), [(200, "200"), (404, "404"), (529, "5xx"), (799, "other"), (None, "none")])
def test_code_is_the_status_where_no_word_of_ours_is(status: int | None, code: str) -> None:
    metrics = House().metrics()
    for _ in range(2):
        metrics.ended(ended(stream(status=status), Outcome.UPSTREAM_STATUS))
    samples = scrape(metrics)
    assert value(samples, "requests_total", model="llama", backend="b1", outcome="upstream_status", code=code) == 2


def test_models_are_capped_and_make_room_when_they_go() -> None:
    house = House()
    house.models = ["a", "b", "c"]
    metrics = house.metrics(max_models=2)
    for model in ("a", "b", "c", "a"):
        metrics.ended(ended(stream(model=model)))
    samples = scrape(metrics)
    pair = {"backend": "b1", "outcome": "complete", "code": "200"}
    assert value(samples, "requests_total", model="a", **pair) == 2
    assert value(samples, "requests_total", model="c", **pair) is None
    assert value(samples, "requests_total", model="other", **pair) == 1
    house.models = ["b", "c"]
    metrics.ended(ended(stream(model="c")))
    samples = scrape(metrics)
    assert value(samples, "requests_total", model="c", **pair) == 1
    assert value(samples, "requests_total", model="a", **pair) is None
    assert value(samples, "requests_total", model="b", **pair) == 1


def test_what_waits_to_be_counted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKEN_AT", 1)
    monkeypatch.setattr(module, "WAITING_MOST", 4)
    metrics = House().metrics()
    waiting = []
    for status in range(400, 410):
        metrics.ended(ended(stream(status=status), Outcome.UPSTREAM_STATUS))
        waiting.append(sum(len(rows) for series in metrics.series.values() for rows in series.waiting.values()))
    assert waiting == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert total(scrape(metrics), "requests_total") == 10


def test_what_waited_for_a_backend_that_went_counts_where_no_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKEN_AT", 1)
    monkeypatch.setattr(module, "MAX_BACKENDS", 2)
    house = House()
    metrics = house.metrics()
    metrics.ended(ended(stream(backend="b1")))
    house.backends = [BackendSample("b3", True, "up", 0, 0)]
    for name in ("b2", "b3"):
        metrics.ended(ended(stream(backend=name)))
    samples = scrape(metrics)
    assert {dict(pairs)["backend"] for name, pairs in samples if name == "requests_total"} == {"b3"}
    assert total(samples, "body_seconds_count") == 3


def test_backends_that_come_and_go_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKENDS", 4)
    house = House()
    metrics = house.metrics()
    for number in range(50):
        house.backends = [BackendSample(f"pod-{number}", True, "up", 1, 1)]
        house.live = [stream(backend=f"pod-{number}")]
        scrape(metrics)
        metrics.ended(ended(house.live.pop()))
    samples = scrape(metrics)
    names = {dict(pairs).get("backend") for _, pairs in samples} - {None}
    assert "pod-49" in names
    assert len(names) <= 5
    assert len(metrics.series) <= 5
    house.backends = [BackendSample(f"many-{number}", True, "up", 1, 1) for number in range(10)]
    for backend in house.backends:
        metrics.ended(ended(stream(backend=backend.name)))
    assert value(scrape(metrics), "requests_total", model="llama", backend="other", outcome="complete", code="200")


@pytest.mark.parametrize("labels", [[], ["model"], ["backend"], ["model", "backend"]])
def test_labels_can_be_left_out(labels: list[str]) -> None:
    house = House()
    metrics = house.metrics(labels=labels)
    for model in ("llama", "qwen", "unknown"):
        for backend in ("b1", "b2"):
            metrics.ended(ended(stream(model=model, backend=backend)))
    house.live = [stream()]
    samples = scrape(metrics)
    assert total(samples, "requests_total") == 6
    assert total(samples, "time_to_first_token_seconds_count") == 7
    assert {key for name, pairs in samples for key, _ in pairs if name == "time_to_first_token_seconds_sum"} == {*labels}
    assert {key for name, pairs in samples for key, _ in pairs if name == "requests_in_flight"} == {*labels, "phase"}
    assert value(samples, "backend_up", backend="b1") == 1  # what is of a backend by nature keeps its name


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (PROMETHEUS_ACCEPT, True),
        ("application/openmetrics-text", True),
        ("application/OpenMetrics-Text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nonsense", False),
        ("text/plain;q=0.9,application/openmetrics-text;q=0.5", False),
        ("text/html,application/openmetrics-text;q=0.5,*/*;q=0.9", True),
    ],
)
def test_negotiation(accept: str | None, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted
    assert House().metrics().render(accept)[1] == (OPENMETRICS if wanted else TEXT)


def test_both_formats_say_the_same() -> None:
    _, metrics = busy_house()
    pieces, content_type = metrics.render(PROMETHEUS_ACCEPT)
    body = b"".join(pieces)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")
    exact = {
        (sample.name.removeprefix("tokenpipe_"), frozenset(sample.labels.items())): sample.value
        for family in parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if not sample.name.startswith("process_")
    }
    assert exact == {key: number for key, number in scrape(metrics).items() if not key[0].startswith("process_")}


def test_promtool_finds_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool")
    _, metrics = busy_house()
    pieces, _ = metrics.render(None)
    body = b"".join(pieces)
    result = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_two_sets_of_metrics_do_not_meet() -> None:
    one, other = House().metrics(), House().metrics()
    one.ended(ended(stream()))
    assert total(scrape(other), "requests_total") == 0


def test_ended_is_cheap() -> None:
    """Generous by far: it catches a change of kind, not of degree. `python -m tests.telemetry.cost` measures."""
    metrics = House().metrics()
    exchanges = [ended(stream()) for _ in range(2000)]
    began = time.process_time()
    for exchange in exchanges:
        metrics.ended(exchange)
    assert (time.process_time() - began) / len(exchanges) < 100e-6


def test_with_the_real_meter() -> None:
    """What `FakeMeter` pretends is what there is."""
    dialect = for_path("/v1/chat/completions")
    assert dialect is not None
    meter = Meter(dialect, B_TPOT, True)
    for number in range(3):
        meter.feed(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', ACCEPTED + 0.4 + number / 50)
    meter.feed(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n', ACCEPTED + 0.5)
    meter.feed(b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n', ACCEPTED + 0.5)
    meter.feed(b"data: [DONE]\n\n", ACCEPTED + 0.5)
    meter.end()
    metrics = House().metrics()
    metrics.ended(ended(stream(meter), meter.verdict(True)))
    samples = scrape(metrics)
    pair = {"model": "llama", "backend": "b1"}
    assert value(samples, "inter_token_latency_seconds_count", **pair) == 2
    assert value(samples, "inter_token_latency_seconds_sum", **pair) == pytest.approx(0.04)
    assert value(samples, "time_per_output_token_seconds_sum", **pair, source="usage") == pytest.approx(0.02)
    assert value(samples, "output_tokens_total", **pair, source="usage") == 3
    assert value(samples, "prompt_tokens_total", **pair, source="usage") == 9
    assert value(samples, "finish_reasons_total", **pair, reason="stop") == 1
