"""The scrape: what `metrics` has counted, as text.

It first settles the running exchanges, so that a stream of ten minutes is seen while it runs, then reads the plain
numbers. Every family is always there, with help and type, even while it has no sample; a histogram nobody has observed
yet has none, but for those that an objective on the first token is made of: what has not begun at zero has no rate.

All of it is done in pieces, of which none takes as much as a millisecond, so that whoever asks for them can let the event
loop do other things in between: a gateway with hundreds of series and thousands of streams is read without holding up a
single token. So it is no snapshot of one moment, but each histogram is consistent in itself.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from gateway.core.outcome import Phase
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.page import Page, labels, sample, wants_openmetrics
from gateway.telemetry.process import Process

if TYPE_CHECKING:
    from gateway.telemetry.metrics import BackendTally, Metrics
    from gateway.telemetry.series import LabelPair, Series

PREFIX = "tokenpipe_"
PIECE = 65536  # characters, after which there is a cut
PART_WORTH = 1024  # characters that each part counts for beside its text: to look at an exchange is work without any

# name, help, where it is in a `Series`: those of model and backend alone
HISTOGRAMS: tuple[tuple[str, str, Callable[[Series], Histogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "Request received to first event with output written to the client; streams only, whatever came of them.",
        attrgetter("ttft"),
    ),
    (
        "upstream_time_to_first_token_seconds",
        "Request sent, in the last attempt, to first event with output read from the backend.",
        attrgetter("upstream_ttft"),
    ),
    (
        "abandoned_seconds",
        "Request received to the client's end, of streams whose client left before the first event with output.",
        attrgetter("abandoned"),
    ),
    (
        "inter_token_latency_seconds",
        "Gap between output events as they arrive: per event, which may hold several tokens.",
        attrgetter("itl"),
    ),
    ("stream_max_gap_seconds", "The longest gap between output events of each stream.", attrgetter("max_gap")),
    ("time_to_first_byte_seconds", "Request received to first byte of the response's body.", attrgetter("first_byte")),
    ("queue_seconds", "Waiting to be admitted: 0 where that was at once.", attrgetter("queue")),
    ("connect_seconds", "Getting a connection to the backend, in the last attempt.", attrgetter("connect")),
    ("response_head_seconds", "Request sent, in the last attempt, to the response's head received.", attrgetter("head")),
    ("first_event_seconds", "Response's head received to first event with output read.", attrgetter("first_event")),
)

OBJECTIVE = {"time_to_first_token_seconds", "abandoned_seconds"}

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
    (
        "no_first_token",
        "Requests for a stream that ended without any event with output, by whose fault: the client's, who left or asked for "
        "what there is not; or the service's.",
        "fault",
        attrgetter("tokenless"),
    ),
    ("finish_reasons", "Why backends say that their output ended.", "reason", attrgetter("finish_reasons")),
)

# name, help, where it is in a `Series`
NUMBERS: tuple[tuple[str, str, Callable[[Series], int]], ...] = (
    ("cached_prompt_tokens", "Of the prompt tokens, those from a cache, as backends report them.", attrgetter("cached_tokens")),
    ("stream_events", "Output events of streams that ended.", attrgetter("events")),
    ("stream_reads", "Reads that brought output events: fewer than these where events came together.", attrgetter("reads")),
    ("opaque_streams", "Responses with an event too long to be looked into.", attrgetter("opaque")),
)

# name, help, where it is in a `BackendTally`
TALLIES: tuple[tuple[str, str, Callable[[BackendTally], float]], ...] = (
    ("upstream_connections_reused", "Requests on a pooled connection.", attrgetter("reused")),
    ("backpressure_pauses", "Times it was held back by a client.", attrgetter("pauses")),
    ("backpressure_seconds", "Time it was held back by clients.", attrgetter("paused_seconds")),
)


class Exposition:
    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._pair_names = [name for name, on in (("model", metrics.by_model), ("backend", metrics.by_backend)) if on]
        self._states: dict[str, None] = {}  # of backends, as they were seen: a set in order
        self._process = Process()

    def render(self, accept: str | None) -> tuple[Iterator[bytes], str]:
        page = Page(wants_openmetrics(accept))
        return _pieces(self._parts(page)), page.content_type

    def _parts(self, page: Page) -> Iterator[str]:
        """The lines, some at a time; and an empty part for each exchange or client that was looked at."""
        in_flight: dict[tuple[LabelPair, Phase], int] = {}
        for exchange in self._metrics.sources.live():
            series = self._metrics.settle(exchange)
            if exchange.outcome is None:
                key = (series.labels, exchange.phase)
                in_flight[key] = in_flight.get(key, 0) + 1
            yield ""
        pairs: Pairs = []
        for series in list(self._metrics.series.values()):
            pairs.append((self._pair(series.labels), series))
            yield ""
        yield from self._of_requests(page, pairs, in_flight)
        yield from self._of_series(page, pairs)
        yield from self._of_stages(page)
        yield from self._metrics.pairs.render(page)
        yield from self._of_the_house(page)
        yield from self._of_backend_samples(page)
        yield from self._of_backend_tallies(page)
        yield from self._of_the_process(page)
        yield page.end

    def _pair(self, pair: LabelPair) -> str:
        kept = (self._metrics.by_model, self._metrics.by_backend)
        return labels(self._pair_names, [value for value, on in zip(pair, kept, strict=True) if on])

    def _of_requests(self, page: Page, pairs: Pairs, in_flight: dict[tuple[LabelPair, Phase], int]) -> Iterator[str]:
        name = PREFIX + "requests"
        yield page.family(name, "counter", "Exchanges that ended.")
        for pair, series in pairs:
            for end, n in list(series.requests.items()):
                yield sample(f"{name}_total", _and(pair, labels(("outcome", "code"), end)), n)
        name = PREFIX + "requests_in_flight"
        yield page.family(name, "gauge", "Exchanges under way.")
        for pair, series in pairs:  # at 0 too: a graph falls to it, and is not empty where no scrape has met a request
            for phase in Phase:
                yield sample(name, _and(pair, labels(["phase"], [phase])), in_flight.get((series.labels, phase), 0))
        name = PREFIX + "request_duration_seconds"
        yield page.family(name, "histogram", "Request received to its end.")
        for pair, series in pairs:
            for outcome, histogram in list(series.duration.items()):
                yield page.histogram(name, _and(pair, labels(["outcome"], [outcome])), histogram)

    def _of_series(self, page: Page, pairs: Pairs) -> Iterator[str]:
        for name, help_, find in HISTOGRAMS:
            yield page.family(PREFIX + name, "histogram", help_)
            for pair, series in pairs:
                histogram = find(series)
                seen = name in OBJECTIVE or any(histogram.counts)
                yield page.histogram(PREFIX + name, pair, histogram) if seen else ""
        name = PREFIX + "time_per_output_token_seconds"
        yield page.family(
            name, "histogram", "(last - first output event) / (output tokens - 1), of complete streams of one choice."
        )
        for pair, series in pairs:
            for source, histogram in series.tpot.items():
                inside = _and(pair, labels(["source"], [source]))
                yield page.histogram(name, inside, histogram) if any(histogram.counts) else ""
        for name, help_, label, count in COUNTERS:
            yield page.family(PREFIX + name, "counter", help_)
            for pair, series in pairs:
                for value, n in list(count(series).items()):
                    yield sample(f"{PREFIX}{name}_total", _and(pair, labels([label], [value])), n)
        for name, help_, number in NUMBERS:
            yield page.family(PREFIX + name, "counter", help_)
            for pair, series in pairs:
                yield sample(f"{PREFIX}{name}_total", pair, number(series))

    def _of_stages(self, page: Page) -> Iterator[str]:
        stages = self._metrics.stages
        yield from _single(
            page, "body_seconds", "Request's head to its body, as far as it is read before it is sent on.", stages.body
        )
        yield from _single(page, "pick_seconds", "Admitted to a backend picked; requests of one attempt.", stages.pick)
        name = PREFIX + "overhead_seconds"
        yield page.family(
            name,
            "histogram",
            "The gateway's own time. request: from the request's head to a backend picked, without waiting for the body and "
            "in the queue. first_event: from the first event with output read to written.",
        )
        yield page.histogram(name, 'stage="request"', stages.request)
        yield page.histogram(name, 'stage="first_event"', stages.first_event)

    def _of_the_house(self, page: Page) -> Iterator[str]:
        metrics = self._metrics
        yield from _by_word(page, "tpot_skipped", "Streams with output but without a TPOT.", "reason", metrics.tpot_skipped)
        yield from _by_word(page, "client_aborts", "Clients that left early.", "phase", metrics.client_aborts)
        yield from _by_word(page, "retries", "Attempts after the first one.", "reason", metrics.retries)
        help_ = "Second attempts beside a late first one: that won, that lost, or that failed like the first."
        yield from _by_word(page, "hedges", help_, "result", metrics.hedges)
        help_ = "Streams whose backend failed, and that another one went on with; by what had failed."
        yield from _by_word(page, "migrations", help_, "reason", metrics.migrations)
        yield from _single(page, "abort_seconds", "Client's end seen to the upstream's socket closed.", metrics.abort_seconds)
        relayed = {"in": metrics.bytes_in, "out": metrics.bytes_out}
        help_ = "Bytes of bodies, from clients (in) and to them (out)."
        yield from _by_word(page, "relayed_bytes", help_, "direction", relayed)
        buffered = 0
        for octets in metrics.sources.write_buffers():
            buffered += octets
            yield ""
        yield from _gauge(page, "write_buffer_bytes", "Held for clients now.", [("", buffered)])
        depth = metrics.sources.queue_depth()
        yield from _gauge(page, "queue_depth", "Requests waiting for a backend.", [("", depth)])

    def _of_backend_samples(self, page: Page) -> Iterator[str]:
        samples = []
        for each in self._metrics.sources.backends():
            samples.append((labels(["backend"], [each.name]), each))
            self._metrics.tally_of(each.name)  # its counters begin at zero, not at the first failure
            self._states[each.state] = None
            yield ""
        yield from _gauge(page, "backend_up", "Whether requests can be routed to it.", ((b, int(x.up)) for b, x in samples))
        seen = list(self._states)
        states = (
            (_and(backend, labels(["state"], [state])), int(state == each.state)) for backend, each in samples for state in seen
        )
        yield from _gauge(page, "backend_state", "1 for the state it is in.", states)
        in_flight = ((backend, each.in_flight) for backend, each in samples)
        yield from _gauge(page, "backend_in_flight", "Exchanges it is counted for: its leases.", in_flight)
        connections = ((backend, each.connections) for backend, each in samples)
        yield from _gauge(page, "upstream_connections", "Open connections to it, idle ones included.", connections)
        name = PREFIX + "panic_picks"
        yield page.family(name, "counter", "Attempts given to it while probes found nobody well (health.panic).")
        for backend, each in samples:
            yield sample(f"{name}_total", backend, each.panics)

    def _of_backend_tallies(self, page: Page) -> Iterator[str]:
        tallies = []
        for each, tally in list(self._metrics.backends.items()):
            tallies.append((labels(["backend"], [each]), tally))
            yield ""
        name = PREFIX + "backend_failures"
        yield page.family(name, "counter", "Attempts that failed by its fault.")
        for backend, tally in tallies:
            for reason, n in list(tally.failures.items()):
                yield sample(f"{name}_total", _and(backend, labels(["reason"], [reason])), n)
        for name, help_, find in TALLIES:
            yield page.family(PREFIX + name, "counter", help_)
            for backend, tally in tallies:
                yield sample(f"{PREFIX}{name}_total", backend, find(tally))

    def _of_the_process(self, page: Page) -> Iterator[str]:
        metrics = self._metrics
        yield from _single(page, "event_loop_lag_seconds", "How late the event loop calls back.", metrics.loop_lag_seconds)
        yield from _by_word(page, "config_reloads", "Configurations loaded anew.", "result", metrics.reloads)
        name = "config_last_reload_success_timestamp_seconds"
        yield from _gauge(page, name, "When the configuration in force was loaded.", [("", metrics.last_reload)])
        build = labels(("version", "python"), (metrics.version, platform.python_version()))
        yield from _gauge(page, "build_info", "Always 1.", [(build, 1)])
        for each in self._process.read():
            if each is None:
                yield ""
            else:
                name, kind, help_, number = each
                yield page.family(name, kind, help_) + sample(f"{name}_total" if kind == "counter" else name, "", number)


Pairs = list[tuple[str, "Series"]]


def _pieces(parts: Iterable[str]) -> Iterator[bytes]:
    """The parts, joined until there is a piece of them; it may be that nothing was written in it."""
    piece: list[str] = []
    worth = 0
    for part in parts:
        piece.append(part)
        worth += len(part) + PART_WORTH
        if worth >= PIECE:
            yield "".join(piece).encode(errors="replace")
            piece.clear()
            worth = 0
    yield "".join(piece).encode(errors="replace")


def _and(inside: str, more: str) -> str:
    return f"{inside},{more}" if inside else more


def _single(page: Page, name: str, help_: str, histogram: Histogram) -> Iterator[str]:
    yield page.family(PREFIX + name, "histogram", help_)
    yield page.histogram(PREFIX + name, "", histogram)


def _gauge(page: Page, name: str, help_: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    """`values`: the labels, as they are written, and the number; each is asked for when its line is made."""
    yield page.family(PREFIX + name, "gauge", help_)
    for inside, value in values:
        yield sample(PREFIX + name, inside, value)


def _by_word(page: Page, name: str, help_: str, label: str, counts: Mapping[str, int]) -> Iterator[str]:
    yield page.family(PREFIX + name, "counter", help_)
    for word, n in list(counts.items()):
        yield sample(f"{PREFIX}{name}_total", labels([label], [word]), n)
