"""What is counted, and where: the part of the metrics that the data path pays for.

An observation is an addition to a plain number; Prometheus's objects come into being at scrape time only
(`exposition`). All that is counted for one pair of labels, model and backend, is one `Series`, looked up once, when the
exchange ends. A running stream costs nothing here: a scrape walks the running exchanges and counts what has grown
(`settle`), leaving its mark on the exchange, so that nothing is counted twice whoever comes first.

Labels are bounded. A model is named only if the configuration or a backend names it, and only `max_models` of them;
backends come from the operator, but pods come and go, so there is a limit of them too, at which the series of those
that have gone are forgotten. Everything else is `other`. No string of a client's ever becomes a label.
"""

from __future__ import annotations

import http
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from gateway.core.exchange import Exchange
from gateway.core.outcome import RULINGS, Outcome
from gateway.telemetry.durations import durations, ttft
from gateway.telemetry.exposition import Exposition
from gateway.telemetry.histogram import B_E2E, B_OVH, B_TPOT, B_TTFT, B_WAIT, Histogram

OTHER, NONE = "other", "none"
MAX_BACKENDS = 256
FOLD_AT = 32  # ended exchanges that wait to be counted
MAX_WORDS = 64  # distinct reasons of one counter

STATUSES = frozenset(status.value for status in http.HTTPStatus)
FINISH_REASONS = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"}
    | {"end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"}  # Anthropic
    | {"completed", "incomplete", "max_output_tokens"}  # Responses
)
CODES = frozenset(Outcome) | {NONE}  # beside `RULINGS`, which may grow

LabelPair = tuple[str, str]  # model, backend


class BackendSample(NamedTuple):
    """One backend as it stands at the moment of a scrape."""

    name: str
    up: bool
    state: str
    in_flight: int
    connections: int


class Sources(NamedTuple):
    """Where a scrape reads what is not counted but simply is."""

    known_models: Callable[[], Collection[str]]
    live: Callable[[], Iterable[Exchange]]
    backends: Callable[[], Iterable[BackendSample]]
    queue_depth: Callable[[], int]
    write_buffer_bytes: Callable[[], int]


class Series:
    """All that is counted for one model on one backend."""

    __slots__ = (
        "connect", "duration", "finish_reasons", "first_byte", "itl", "output_tokens", "prompt_tokens", "queue",
        "requests", "tpot", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str | int]] = Counter()  # by outcome, and code or status
        self.duration: dict[str, Histogram] = {}  # by outcome
        self.ttft = Histogram(B_TTFT)
        self.tpot = {"usage": Histogram(B_TPOT), "events": Histogram(B_TPOT)}
        self.itl = Histogram(B_TPOT)
        self.first_byte = Histogram(B_TTFT)
        self.queue = Histogram(B_WAIT)
        self.connect = Histogram(B_WAIT)
        self.prompt_tokens: Counter[str] = Counter()  # by source
        self.output_tokens: Counter[str] = Counter()  # by source
        self.finish_reasons: Counter[str] = Counter()


class BackendTally:
    """All that is counted for one backend, whatever the model."""

    __slots__ = ("failures", "paused_seconds", "pauses", "reused")

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.pauses = 0
        self.paused_seconds = 0.0
        self.reused = 0


class Metrics:
    """The observer of exchanges that counts. `render` is the scrape."""

    def __init__(
        self,
        sources: Sources,
        *,
        wall: Callable[[], float],
        version: str,
        labels: Collection[str] = ("model", "backend"),
        max_models: int = 100,
    ):
        self.sources, self.version, self.wall = sources, version, wall
        self.by_model, self.by_backend = "model" in labels, "backend" in labels
        self._max_models = max_models
        self._models: set[str] = set()  # that are labels
        self._cache: dict[tuple[str | None, str | None], Series] = {}  # by what an exchange says: bounded names only
        self.series: dict[LabelPair, Series] = {}
        self.backends: dict[str, BackendTally] = {}
        self.tpot_skipped: Counter[str] = Counter()
        self.client_aborts: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.abort_seconds = Histogram(B_OVH)
        self.loop_lag_seconds = Histogram(B_OVH)
        self.bytes_in = self.bytes_out = 0
        self.reloads = {"success": 0, "failure": 0}
        self.last_reload = wall()  # a start is a load that succeeded
        self._ended: list[Exchange] = []
        self._exposition = Exposition(self)

    # ---- the data path tells (core.exchange.Observer) ----

    def ended(self, exchange: Exchange) -> None:
        """Counted with others soon (`fold`): what is done many times in a row costs a fraction of what is done now and then."""
        self._ended.append(exchange)
        if len(self._ended) >= FOLD_AT:
            self.fold()

    def fold(self) -> None:
        """Count the exchanges that have ended since the last time."""
        ended, self._ended = self._ended, []
        for exchange in ended:
            self._count(exchange)

    def _count(self, exchange: Exchange) -> None:
        series = self.series_of(exchange)
        took = durations(exchange)
        self._settle(exchange, series, took.ttft)
        outcome = exchange.outcome or Outcome.INTERNAL  # whoever ended it without a word has a bug
        key = (outcome, exchange.code or exchange.status or NONE)
        if key not in series.requests:  # only a new word needs a look
            key = (outcome, _code(key[1]))
        series.requests[key] += 1
        if outcome is Outcome.CLIENT_GONE:
            self.client_aborts[exchange.phase] += 1
        if exchange.paused_at is not None and exchange.ended is not None:  # never resumed
            self.tally_of(exchange.backend).paused_seconds += exchange.ended - exchange.paused_at
        if took.total is not None:
            histogram = series.duration.get(outcome)
            if histogram is None:
                histogram = series.duration[outcome] = Histogram(B_E2E)
            histogram.observe(took.total)
        if took.queue is not None:
            series.queue.observe(took.queue)
        if took.connect is not None:
            series.connect.observe(took.connect)
        if took.first_byte is not None:
            series.first_byte.observe(took.first_byte)
        if exchange.meter is not None:
            self._count_output(exchange, series, took.tpot)

    def paused(self, exchange: Exchange) -> None:
        self.tally_of(exchange.backend).pauses += 1

    def resumed(self, exchange: Exchange, seconds: float) -> None:
        self.tally_of(exchange.backend).paused_seconds += seconds

    def aborted(self, exchange: Exchange, seconds: float) -> None:
        self.abort_seconds.observe(seconds)

    def retried(self, exchange: Exchange, reason: str) -> None:
        _bounded_add(self.retries, reason)

    def failed(self, exchange: Exchange, reason: str) -> None:
        _bounded_add(self.tally_of(exchange.backend).failures, reason)

    def connection(self, backend: str, *, reused: bool) -> None:
        if reused:
            self.tally_of(backend).reused += 1

    # ---- the process tells ----

    def loop_lag(self, seconds: float) -> None:
        """How much later than asked for the event loop called back: the error of every other time here."""
        self.loop_lag_seconds.observe(seconds)

    def reloaded(self, *, success: bool) -> None:
        self.reloads["success" if success else "failure"] += 1
        if success:
            self.last_reload = self.wall()

    # ---- the scrape ----

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type, as the Accept header field asks."""
        self.fold()
        return self._exposition.render(accept)

    def settle(self, exchange: Exchange, series: Series) -> None:
        """Count what has grown since a running exchange was last looked at."""
        self._settle(exchange, series, ttft(exchange))

    def _settle(self, exchange: Exchange, series: Series, first: float | None) -> None:
        bytes_in, bytes_out, had_ttft = exchange.counted
        self.bytes_in += exchange.bytes_in - bytes_in
        self.bytes_out += exchange.bytes_out - bytes_out
        if first is not None and not had_ttft:
            series.ttft.observe(first)
        exchange.counted = (exchange.bytes_in, exchange.bytes_out, first is not None)
        if exchange.meter is not None and exchange.meter.events > 1:
            counts, total, n = exchange.meter.take_itl()
            if n:
                series.itl.add(counts, total)

    def series_of(self, exchange: Exchange) -> Series:
        try:
            return self._cache[exchange.model, exchange.backend]
        except KeyError:
            return self._resolve(exchange.model, exchange.backend)

    def labels_of(self, exchange: Exchange) -> LabelPair:
        return self._labels(*self._admit(exchange.model, exchange.backend))

    def outcomes(self) -> Counter[str]:
        """How many exchanges have ended so, whatever their model and backend."""
        self.fold()
        counts: Counter[str] = Counter()
        for series in self.series.values():
            for (outcome, _), number in series.requests.items():
                counts[outcome] += number
        return counts

    # ---- what is counted under which name ----

    def _count_output(self, exchange: Exchange, series: Series, tpot: float | None) -> None:
        meter = exchange.meter
        assert meter is not None
        source, prompt_tokens, output_tokens = meter.token_source, meter.prompt_tokens, meter.output_tokens
        if tpot is not None:
            series.tpot["events" if source == "events" else "usage"].observe(tpot)
        elif meter.first_output is not None and exchange.stream is not False:
            skipped = meter.tpot_skipped if exchange.outcome is Outcome.COMPLETE else None
            self.tpot_skipped[skipped or "not_ok"] += 1
        if prompt_tokens:
            series.prompt_tokens["usage"] += prompt_tokens  # nothing else tells of them
        if output_tokens:
            series.output_tokens[source] += output_tokens
        reason = meter.finish_reason
        if reason is not None:
            series.finish_reasons[reason if reason in FINISH_REASONS else OTHER] += 1

    def _resolve(self, model: str | None, backend: str | None) -> Series:
        known_model, known_backend = self._admit(model, backend)
        labels = self._labels(known_model, known_backend)
        series = self.series.get(labels)
        if series is None:
            series = self.series[labels] = Series()
        if known_model == model and known_backend == backend:  # what is not known is looked up anew each time
            self._cache[model, backend] = series
        return series

    def _labels(self, model: str | None, backend: str | None) -> LabelPair:
        return (
            (OTHER if model is None else model) if self.by_model else "",
            (NONE if backend is None else backend) if self.by_backend else "",
        )

    def _admit(self, model: str | None, backend: str | None) -> tuple[str | None, str | None]:
        """The two names, as far as they may become labels."""
        if model is not None and model not in self._models:
            known = self.sources.known_models()
            if model not in known or not self._room_for_models(known):
                model = None
            else:
                self._models.add(model)
        if backend is not None and backend not in self.backends:
            backend = backend if self._room_for_backends() else OTHER
            self.backends.setdefault(backend, BackendTally())
        return model, backend

    def tally_of(self, name: str | None) -> BackendTally:
        try:
            return self.backends[name or NONE]
        except KeyError:
            _, name = self._admit(None, name or NONE)
            return self.backends[name or NONE]

    def _room_for_models(self, known: Collection[str]) -> bool:
        if len(self._models) >= self._max_models:
            gone = self._models.difference(known)
            self._models -= gone
            self._forget(0, gone)
        return len(self._models) < self._max_models

    def _room_for_backends(self) -> bool:
        if len(self.backends) >= MAX_BACKENDS:
            gone = self.backends.keys() - {sample.name for sample in self.sources.backends()} - {NONE, OTHER}
            for name in gone:
                del self.backends[name]
            self._forget(1, gone)
        return len(self.backends) < MAX_BACKENDS

    def _forget(self, which: int, gone: Collection[str]) -> None:
        """A series that ends is no reset of a counter: `rate()` takes no harm."""
        if gone:
            self.series = {labels: series for labels, series in self.series.items() if labels[which] not in gone}
            self._cache = {names: series for names, series in self._cache.items() if names[which] not in gone}
            self._exposition.forget(which, gone)


def _code(word: str | int) -> str | int:
    """A code word of ours, or a status: exact where it is a registered one, else its class."""
    if isinstance(word, int):
        return word if word in STATUSES else f"{word // 100}xx" if 100 <= word < 600 else OTHER
    return word if word in RULINGS or word in CODES else OTHER


def _bounded_add(counter: Counter[str], word: str) -> None:
    """Reasons are words of this program's, but a bound that rests on nobody's care is a better one."""
    counter[word if word in counter or len(counter) < MAX_WORDS else OTHER] += 1
