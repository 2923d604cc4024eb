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
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from gateway.core.exchange import Exchange
from gateway.core.outcome import RULINGS, Outcome
from gateway.telemetry.disagg import PairTallies
from gateway.telemetry.durations import durations
from gateway.telemetry.exposition import Exposition
from gateway.telemetry.histogram import B_OVH, Histogram
from gateway.telemetry.rows import begun, numbers
from gateway.telemetry.series import OTHER, End, LabelPair, Series
from gateway.telemetry.stages import Stages

NONE = "none"
MAX_BACKENDS = 256
MAX_SERIES = 512  # pairs of a model and a backend
TAKEN_AT = 128  # exchanges that have ended, of which rows are made together
COUNTED_AT = 64  # rows of one series and end that are counted together
WAITING_MOST = 4096  # rows that wait for others of their kind, of all series together
MAX_WORDS = 64  # distinct reasons of one counter

STATUSES = frozenset(status.value for status in http.HTTPStatus)
_COMPLETE = Outcome.COMPLETE  # looked up once: see core.head
_NOTHING = (0, 0, False)  # of an exchange, no scrape has counted anything
CODES = frozenset(Outcome) | {NONE}  # beside `RULINGS`, which may grow


class BackendSample(NamedTuple):
    """One backend as it stands at the moment of a scrape."""

    name: str
    up: bool
    state: str
    in_flight: int
    connections: int
    panics: int = 0


class Sources(NamedTuple):
    """Where a scrape reads what is not counted but simply is."""

    known_models: Callable[[], Collection[str]]
    live: Callable[[], Iterable[Exchange]]  # may be asked for one after the other, with other things done in between
    backends: Callable[[], Iterable[BackendSample]]  # as `live`
    queue_depth: Callable[[], int]
    write_buffers: Callable[[], Iterable[int]]  # octets held for each client; as `live`


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
        self.hedges: Counter[str] = Counter()
        self.migrations: Counter[str] = Counter()
        self.abort_seconds = Histogram(B_OVH)
        self.loop_lag_seconds = Histogram(B_OVH)
        self.stages = Stages()
        self.pairs = PairTallies(self._label_of)
        self.bytes_in = self.bytes_out = 0
        self.reloads = {"success": 0, "failure": 0}
        self.last_reload = wall()  # a start is a load that succeeded
        self._ended: list[Exchange] = []
        self._waiting = 0  # rows of exchanges, that are still to be counted
        self._exposition = Exposition(self)

    # ---- the data path tells (core.exchange.Observer) ----

    def ended(self, exchange: Exchange) -> None:
        """Counted with others soon (`fold`): what is done many times in a row costs a fraction of what is done now and then."""
        self._ended.append(exchange)
        if exchange.sampled:
            self._exemplify(exchange)
        if len(self._ended) >= TAKEN_AT:
            self._take()

    def _take(self) -> None:
        """Make rows of the exchanges that have ended, and count those of which there are enough."""
        ended, self._ended = self._ended, []
        for exchange in ended:
            outcome = exchange.outcome or Outcome.INTERNAL  # whoever ended it without a word has a bug
            series = self.series_of(exchange)
            end: End = (outcome, exchange.code or exchange.status or NONE)
            rows = series.waiting.get(end)
            if rows is None:  # only a new word needs a look
                end = (outcome, _code(end[1]))
                rows = series.waiting.setdefault(end, [])
            rows.append(row := numbers(exchange))
            meter, output = exchange.meter, row[-1]
            if meter is not None and output is not None and output[0][1] > 1:
                series.gaps(meter)
            bytes_in, bytes_out, _ = exchange.counted or _NOTHING
            self.bytes_in += exchange.bytes_in - bytes_in
            self.bytes_out += exchange.bytes_out - bytes_out
            if outcome is not _COMPLETE:
                self._count_odd(exchange, series, end)
            if exchange.paused_at is not None and exchange.ended is not None:  # never resumed
                self.tally_of(exchange.backend).paused_seconds += exchange.ended - exchange.paused_at
            self._waiting += 1
            if len(rows) >= COUNTED_AT:
                self._count(series, end)
        if self._waiting >= WAITING_MOST:
            self._count_all()

    def fold(self) -> None:
        """Count the exchanges that have ended since the last time."""
        self._take()
        self._count_all()

    def _count_all(self) -> None:
        if self._waiting:
            for series in self.series.values():
                for end in series.waiting:
                    self._count(series, end)

    def _count(self, series: Series, end: End) -> None:
        columns = series.count(end)
        if columns is not None:
            self._waiting -= len(columns.total)
            self.stages.count(columns)
            self.tpot_skipped.update([output[2] for output in columns.output if output is not None and output[2] is not None])

    def _count_odd(self, exchange: Exchange, series: Series, end: End) -> None:
        if exchange.stream and exchange.first_output_written is None:
            series.no_first_token(exchange, end)
        if end[0] is Outcome.CLIENT_GONE:
            self.client_aborts[exchange.phase] += 1

    def _exemplify(self, exchange: Exchange) -> None:
        """Name its trace in the buckets that it falls into: someone keeps it."""
        trace, now, series = exchange.trace_id, self.wall(), self.series_of(exchange)
        *_, first, tpot, total = durations(exchange)
        assert trace is not None
        if first is not None:
            series.ttft.exemplify(first, trace, now)
        if tpot is not None and exchange.meter is not None:
            series.tpot["events" if exchange.meter.token_source == "events" else "usage"].exemplify(tpot, trace, now)
        if total is not None and exchange.outcome is not None:
            series.duration_of(exchange.outcome).exemplify(total, trace, now)

    def paused(self, exchange: Exchange) -> None:
        self.tally_of(exchange.backend).pauses += 1

    def resumed(self, exchange: Exchange, seconds: float) -> None:
        self.tally_of(exchange.backend).paused_seconds += seconds

    def aborted(self, exchange: Exchange, seconds: float) -> None:
        self.abort_seconds.observe(seconds)

    def retried(self, exchange: Exchange, reason: str) -> None:
        _bounded_add(self.retries, reason)

    def hedged(self, exchange: Exchange, result: str) -> None:
        _bounded_add(self.hedges, result)

    def migrated(self, exchange: Exchange, reason: str) -> None:
        self.settle(exchange)  # the first token and the gaps so far are of the backend that it has now
        _bounded_add(self.migrations, reason)

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

    def render(self, accept: str | None) -> tuple[Iterator[bytes], str]:
        """The exposition, in pieces (`exposition`), and its content type, as the Accept header field asks."""
        self.fold()
        return self._exposition.render(accept)

    def settle(self, exchange: Exchange) -> Series:
        """Count what has grown since a running exchange was last looked at. What has ended is `fold`'s."""
        series = self.series_of(exchange)
        if exchange.outcome is None:
            self._settle(exchange, exchange.counted or _NOTHING, series)
            if exchange.meter is not None and exchange.meter.events > 1:
                series.gaps(exchange.meter)
        return series

    def _settle(self, exchange: Exchange, counted: tuple[int, int, bool], series: Series) -> None:
        bytes_in, bytes_out, had_ttft = counted
        self.bytes_in += exchange.bytes_in - bytes_in
        self.bytes_out += exchange.bytes_out - bytes_out
        has_ttft = exchange.first_output_written is not None and exchange.stream is not False
        if has_ttft and not had_ttft:
            first = begun(exchange)
            series.begun(first)
            if first[3] is not None:
                self.stages.first_event.observe(first[3])
        exchange.counted = (exchange.bytes_in, exchange.bytes_out, has_ttft)

    def series_of(self, exchange: Exchange) -> Series:
        try:
            return self._cache[exchange.model, exchange.backend]
        except KeyError:
            return self._resolve(exchange.model, exchange.backend)

    def outcomes(self) -> Counter[str]:
        """How many exchanges have ended so, whatever their model and backend."""
        self.fold()
        counts: Counter[str] = Counter()
        for series in self.series.values():
            for (outcome, _), number in series.requests.items():
                counts[outcome] += number
        return counts

    # ---- what is counted under which name ----

    def _resolve(self, model: str | None, backend: str | None) -> Series:
        known_model, known_backend = self._admit(model, backend)
        labels = self._labels(known_model, known_backend)
        series = self.series.get(labels)
        if series is None:
            if not self._room_for_series():
                labels = (OTHER if self.by_model else "", OTHER if self.by_backend else "")
            series = self.series.setdefault(labels, Series(labels))
        if known_model == model and known_backend == backend:  # what is not known is looked up anew each time
            self._cache[model, backend] = series
        return series

    def _label_of(self, model: str | None) -> str:
        known, _ = self._admit(model, None)
        return self._labels(known, None)[0]

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
            self._forget_backends()
        return len(self.backends) < MAX_BACKENDS

    def _room_for_series(self) -> bool:
        if len(self.series) >= MAX_SERIES:
            self._forget_backends()
        return len(self.series) < MAX_SERIES

    def _forget_backends(self) -> None:
        """Those that have gone."""
        gone = self.backends.keys() - {sample.name for sample in self.sources.backends()} - {NONE, OTHER}
        for name in gone:
            del self.backends[name]
        self._forget(1, gone)

    def _forget(self, which: int, gone: Collection[str]) -> None:
        """A series that ends is no reset of a counter: `rate()` takes no harm."""
        if gone:
            self._count_all()
            self.series = {labels: series for labels, series in self.series.items() if labels[which] not in gone}
            self._cache = {}  # there may be room now for those that had none


def _code(word: str | int) -> str | int:
    """A code word of ours, or a status: exact where it is a registered one, else its class."""
    if isinstance(word, int):
        return word if word in STATUSES else f"{word // 100}xx" if 100 <= word < 600 else OTHER
    return word if word in RULINGS or word in CODES else OTHER


def _bounded_add(counter: Counter[str], word: str) -> None:
    """Reasons are words of this program's, but a bound that rests on nobody's care is a better one."""
    counter[word if word in counter or len(counter) < MAX_WORDS else OTHER] += 1
