"""All that is counted for one model on one backend.

Exchanges that ended are counted some dozens at a time (`rows`), those together that ended in the same way: what is done many
times in a row costs a fraction of what is done now and then, and nearly all of it runs in C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gateway.core.exchange import Exchange
from gateway.core.meter import Meter
from gateway.core.outcome import RULINGS, Outcome
from gateway.telemetry.durations import Seconds
from gateway.telemetry.histogram import B_E2E, B_GAP, B_TPOT, B_TTFT, B_WAIT, Histogram
from gateway.telemetry.rows import Begun, Columns, Numbers, Output

OTHER = "other"
FINISH_REASONS = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"}
    | {"end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"}  # Anthropic
    | {"completed", "incomplete", "max_output_tokens"}  # Responses
)

LabelPair = tuple[str, str]  # model, backend
End = tuple[str, str | int]  # an outcome, and its code or status


class Series:
    __slots__ = (
        "abandoned", "cached_tokens", "connect", "duration", "events", "finish_reasons", "first_byte", "first_event", "head",
        "itl", "labels", "max_gap", "opaque", "output_tokens", "prompt_tokens", "queue", "reads", "requests", "tokenless",
        "tpot", "ttft", "upstream_ttft", "waiting",
    )  # fmt: skip

    def __init__(self, labels: LabelPair) -> None:
        self.labels = labels
        self.waiting: dict[End, list[Numbers]] = {}  # of exchanges that ended so, until they are counted
        self.requests: Counter[End] = Counter()
        self.tokenless = {"service": 0, "client": 0}  # streams without an output event, by whose fault that was
        self.duration: dict[str, Histogram] = {}  # by outcome
        self.ttft = Histogram(B_TTFT)
        self.upstream_ttft = Histogram(B_TTFT)
        self.abandoned = Histogram(B_TTFT)
        self.tpot = {"usage": Histogram(B_TPOT), "events": Histogram(B_TPOT)}
        self.itl = Histogram(B_TPOT)
        self.max_gap = Histogram(B_GAP)
        self.first_byte = Histogram(B_TTFT)
        self.queue = Histogram(B_WAIT)
        self.connect = Histogram(B_WAIT)
        self.head = Histogram(B_TTFT)
        self.first_event = Histogram(B_TTFT)
        self.prompt_tokens: Counter[str] = Counter()  # by source
        self.output_tokens: Counter[str] = Counter()  # by source
        self.finish_reasons: Counter[str] = Counter()
        self.cached_tokens = self.events = self.reads = self.opaque = 0

    def count(self, end: End) -> Columns | None:
        """Count the exchanges that wait and ended so. Returns what they are made of, if there are any."""
        rows = self.waiting[end]
        if not rows:
            return None
        of = Columns._make(zip(*rows, strict=True))
        rows.clear()
        outcome = end[0]
        self.requests[end] += len(of.total)
        self.duration_of(outcome).observe_all(present(of.total))
        self.queue.observe_all(present(of.queue))
        self.connect.observe_all(present(of.connect))
        self.head.observe_all(present(of.head))
        self.first_byte.observe_all(present(of.first_byte))
        self.ttft.observe_all(present(of.ttft))
        self.upstream_ttft.observe_all(present(of.upstream_ttft))
        self.first_event.observe_all(present(of.behind_head))
        self._count_output([output for output in of.output if output is not None])
        return of

    def duration_of(self, outcome: str) -> Histogram:
        histogram = self.duration.get(outcome)
        if histogram is None:
            histogram = self.duration[outcome] = Histogram(B_E2E)
        return histogram

    def begun(self, begun: Begun) -> None:
        """A stream that still runs."""
        for histogram, seconds in zip((self.ttft, self.upstream_ttft, self.first_event), begun, strict=False):
            if seconds is not None:
                histogram.observe(seconds)

    def gaps(self, meter: Meter) -> None:
        """Those that came since the last time."""
        counts, total, n = meter.take_itl()
        if n:
            self.itl.add(counts, total)

    def no_first_token(self, exchange: Exchange, end: End) -> None:
        """A stream has ended without an output event."""
        self.tokenless[fault(*end)] += 1
        if end[0] == Outcome.CLIENT_GONE and exchange.ended is not None:
            self.abandoned.observe(exchange.ended - exchange.accepted)

    def _count_output(self, outputs: Iterable[Output]) -> None:
        gaps, longest, reasons = [], [], []
        for (events, _, reads, tokens, source), tpot, _, gap, max_gap, prompt_tokens, cached, reason, opaque in outputs:
            self.events += events
            self.reads += reads
            if gap is not None:
                gaps.append(gap)
            if max_gap is not None:
                longest.append(max_gap)
            if tpot is not None:
                self.tpot["events" if source == "events" else "usage"].observe(tpot)
            if prompt_tokens:
                self.prompt_tokens["usage"] += prompt_tokens  # nothing else tells of them
                self.cached_tokens += cached
            if tokens:
                self.output_tokens[source] += tokens
            if reason is not None:
                reasons.append(reason)
            self.opaque += opaque
        self.itl.observe_all(gaps)
        self.max_gap.observe_all(longest)
        for word in set(reasons):
            self.finish_reasons[word if word in FINISH_REASONS else OTHER] += reasons.count(word)


def present(column: Iterable[Seconds]) -> list[float]:
    return [seconds for seconds in column if seconds is not None]


def fault(outcome: str, code: str | int) -> str:
    """Whose fault it was that a stream gave no output: the `client`'s who left, or asked for what there is not; or the
    `service`'s, engine or gateway, which takes in that it had no room for it."""
    if outcome in (Outcome.CLIENT_GONE, Outcome.CLIENT_STALLED):
        return "client"
    if outcome not in (Outcome.REFUSED, Outcome.UPSTREAM_STATUS):
        return "service"
    ruling = RULINGS.get(str(code))
    if ruling is not None:
        return "client" if ruling.status < 500 else "service"
    return "client" if code != 429 and (code == "4xx" or code in range(400, 500)) else "service"
