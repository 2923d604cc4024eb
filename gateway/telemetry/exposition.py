"""The scrape: what `metrics` has counted, turned into Prometheus's families and text.

One custom collector on a registry of our own (the library's global one belongs to nobody). It first settles the running
exchanges, so that a stream of ten minutes is seen while it runs, then reads the plain numbers. Every family is always
there, with help and type, even while it has no sample; a histogram nobody has observed yet has none.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest as text
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.core.outcome import Phase
from gateway.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from gateway.telemetry.metrics import BackendTally, LabelPair, Metrics, Series

PREFIX = "tokenpipe_"

# Prometheus 3 fails the scrape over a content type it cannot read: these are ours, whatever the library's newest is.
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# name, help, where it is in a `Series`: those of model and backend alone
HISTOGRAMS: tuple[tuple[str, str, Callable[[Series], Histogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "Request received to first event with output written to the client; streams only, whatever came of them.",
        attrgetter("ttft"),
    ),
    (
        "inter_token_latency_seconds",
        "Gap between output events as they arrive: per event, which may hold several tokens.",
        attrgetter("itl"),
    ),
    ("time_to_first_byte_seconds", "Request received to first byte of the response's body.", attrgetter("first_byte")),
    ("queue_seconds", "Request read to a backend picked.", attrgetter("queue")),
    ("connect_seconds", "Getting a connection to the backend, in the last attempt.", attrgetter("connect")),
)

# name, help, the last label, where it is in a `Series`
COUNTERS: tuple[tuple[str, str, str, Callable[[Series], Mapping[str, int]]], ...] = (
    (
        "prompt_tokens",
        "Tokens of prompts, as backends report them.",
        "source",
        attrgetter("prompt_tokens"),
    ),
    (
        "output_tokens",
        "Tokens of output. Where source is events, output events were counted: a lower bound.",
        "source",
        attrgetter("output_tokens"),
    ),
    ("finish_reasons", "Why backends say that their output ended.", "reason", attrgetter("finish_reasons")),
)


class Exposition(Collector):
    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._pair_names = [name for name, on in zip(("model", "backend"), self._kept(), strict=True) if on]
        self._in_flight: dict[tuple[LabelPair, Phase], int] = {}  # a zero stays, so that a graph falls to it
        self._states: dict[str, None] = {}  # of backends, as they were seen: a set in order
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        if wants_openmetrics(accept):
            return openmetrics(self._registry), OPENMETRICS  # type: ignore[no-untyped-call]
        return text(self._registry), TEXT

    def forget(self, which: int, gone: Collection[str]) -> None:
        self._in_flight = {key: n for key, n in self._in_flight.items() if key[0][which] not in gone}

    def collect(self) -> Iterator[Metric]:
        self._settle_live()
        yield from self._of_requests()
        yield from self._of_series()
        yield from self._of_the_house()
        yield from self._of_backend_samples()
        yield from self._of_backend_tallies()
        yield from self._of_the_process()

    def _kept(self) -> tuple[bool, bool]:
        return self._metrics.by_model, self._metrics.by_backend

    def _pair(self, pair: LabelPair) -> list[str]:
        return [value for value, on in zip(pair, self._kept(), strict=True) if on]

    def _settle_live(self) -> None:
        metrics = self._metrics
        self._in_flight = dict.fromkeys(self._in_flight, 0)
        for exchange in list(metrics.sources.live()):
            metrics.settle(exchange, metrics.series_of(exchange))
            if exchange.outcome is None:
                key = (metrics.labels_of(exchange), exchange.phase)
                self._in_flight[key] = self._in_flight.get(key, 0) + 1

    def _of_requests(self) -> Iterator[Metric]:
        series = self._metrics.series
        requests = _counter("requests", "Exchanges that ended.", [*self._pair_names, "outcome", "code"])
        duration = _histogram("request_duration_seconds", "Request received to its end.", [*self._pair_names, "outcome"])
        for pair, each in series.items():
            for (outcome, code), n in each.requests.items():
                requests.add_metric([*self._pair(pair), outcome, str(code)], n)
            for outcome, histogram in each.duration.items():
                _add(duration, [*self._pair(pair), outcome], histogram)
        in_flight = _gauge("requests_in_flight", "Exchanges under way.", [*self._pair_names, "phase"])
        for (pair, phase), n in self._in_flight.items():
            in_flight.add_metric([*self._pair(pair), phase], n)
        yield from (requests, in_flight, duration)

    def _of_series(self) -> Iterator[Metric]:
        series = self._metrics.series
        for name, help_, find in HISTOGRAMS:
            histograms = _histogram(name, help_, self._pair_names)
            for pair, each in series.items():
                _add(histograms, self._pair(pair), find(each))
            yield histograms
        tpot = _histogram(
            "time_per_output_token_seconds",
            "(last - first output event) / (output tokens - 1), of complete streams of one choice.",
            [*self._pair_names, "source"],
        )
        for pair, each in series.items():
            for source, histogram in each.tpot.items():
                _add(tpot, [*self._pair(pair), source], histogram)
        yield tpot
        for name, help_, label, count in COUNTERS:
            counters = _counter(name, help_, [*self._pair_names, label])
            for pair, each in series.items():
                for value, n in count(each).items():
                    counters.add_metric([*self._pair(pair), value], n)
            yield counters

    def _of_the_house(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _by_word("tpot_skipped", "Streams with output but without a TPOT.", "reason", metrics.tpot_skipped)
        yield _by_word("client_aborts", "Clients that left early.", "phase", metrics.client_aborts)
        yield _by_word("retries", "Attempts after the first one.", "reason", metrics.retries)
        yield _single("abort_seconds", "Client's end seen to the upstream's socket closed.", metrics.abort_seconds)
        relayed = {"in": metrics.bytes_in, "out": metrics.bytes_out}
        yield _by_word("relayed_bytes", "Bytes of bodies, from clients (in) and to them (out).", "direction", relayed)
        buffered = metrics.sources.write_buffer_bytes()
        yield GaugeMetricFamily(PREFIX + "write_buffer_bytes", "Held for clients now.", buffered)
        yield GaugeMetricFamily(PREFIX + "queue_depth", "Requests waiting for a backend.", metrics.sources.queue_depth())

    def _of_backend_samples(self) -> Iterator[Metric]:
        samples = list(self._metrics.sources.backends())
        up = _gauge("backend_up", "Whether requests can be routed to it.", ["backend"])
        state = _gauge("backend_state", "1 for the state it is in.", ["backend", "state"])
        in_flight = _gauge("backend_in_flight", "Exchanges it is counted for: its leases.", ["backend"])
        connections = _gauge("upstream_connections", "Open connections to it, idle ones included.", ["backend"])
        self._states.update(dict.fromkeys(sample.state for sample in samples))
        for sample in samples:
            self._metrics.tally_of(sample.name)  # its counters begin at zero, not at the first failure
            up.add_metric([sample.name], sample.up)
            in_flight.add_metric([sample.name], sample.in_flight)
            connections.add_metric([sample.name], sample.connections)
            for name in self._states:
                state.add_metric([sample.name, name], name == sample.state)
        yield from (up, state, in_flight, connections)

    def _of_backend_tallies(self) -> Iterator[Metric]:
        tallies = self._metrics.backends
        failures = _counter("backend_failures", "Attempts that failed by its fault.", ["backend", "reason"])
        for name, tally in tallies.items():
            for reason, n in tally.failures.items():
                failures.add_metric([name, reason], n)
        yield failures
        yield _by_backend("upstream_connections_reused", "Requests on a pooled connection.", tallies, attrgetter("reused"))
        yield _by_backend("backpressure_pauses", "Times it was held back by a client.", tallies, attrgetter("pauses"))
        yield _by_backend("backpressure_seconds", "Time it was held back by clients.", tallies, attrgetter("paused_seconds"))

    def _of_the_process(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _single("event_loop_lag_seconds", "How late the event loop calls back.", metrics.loop_lag_seconds)
        yield _by_word("config_reloads", "Configurations loaded anew.", "result", metrics.reloads)
        name = PREFIX + "config_last_reload_success_timestamp_seconds"
        yield GaugeMetricFamily(name, "When the configuration in force was loaded.", metrics.last_reload)
        build = _gauge("build_info", "Always 1.", ["version", "python"])
        build.add_metric([metrics.version, platform.python_version()], 1)
        yield build


def wants_openmetrics(accept: str | None) -> bool:
    """Whether OpenMetrics is asked for by name, and text not preferred. A wildcard is no name."""
    best = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for entry in (accept or "").lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        fields = dict(part.split("=", 1) for part in parameters if "=" in part)
        # Of OpenMetrics we have 1.0.0 only, which a reader of 0.0.1 or 2.0.0 need not understand.
        if name in best and (name == "text/plain" or fields.get("version", "1.0.0").strip('"') == "1.0.0"):
            best[name] = max(best[name], _quality(fields.get("q", "1")))
    wanted = best["application/openmetrics-text"]
    return wanted > 0 and wanted >= best["text/plain"]


def _quality(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def _counter(name: str, help_: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, help_, labels=labels)


def _gauge(name: str, help_: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, help_, labels=labels)


def _histogram(name: str, help_: str, labels: list[str]) -> HistogramMetricFamily:
    return HistogramMetricFamily(PREFIX + name, help_, labels=labels)


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    if histogram.n:
        family.add_metric(labels, [(_edge(edge), n) for edge, n in histogram.cumulative()], histogram.sum)


def _edge(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _single(name: str, help_: str, histogram: Histogram) -> HistogramMetricFamily:
    family = _histogram(name, help_, [])
    buckets = [(_edge(edge), n) for edge, n in histogram.cumulative()]
    family.add_metric([], buckets, histogram.sum)
    return family


def _by_word(name: str, help_: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = _counter(name, help_, [label])
    for word, n in counts.items():
        family.add_metric([word], n)
    return family


def _by_backend(
    name: str, help_: str, tallies: Mapping[str, BackendTally], find: Callable[[BackendTally], float]
) -> CounterMetricFamily:
    family = _counter(name, help_, ["backend"])
    for backend, tally in tallies.items():
        family.add_metric([backend], find(tally))
    return family
