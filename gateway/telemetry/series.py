"""All that is counted for one model on one backend.

Exchanges that ended are counted some dozens at a time, those together that ended in the same way: what is done many times
in a row costs a fraction of what is done now and then, and nearly all of it runs in C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gateway.core.exchange import Exchange
from gateway.core.meter import Meter
from gateway.core.outcome import RULINGS, Outcome
from gateway.telemetry.histogram import B_E2E, B_GAP, B_TPOT, B_TTFT, B_WAIT, Histogram

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
        "tpot", "ttft", "upstream_ttft",
    )  # fmt: skip

    def __init__(self, labels: LabelPair) -> None:
        self.labels = labels
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

    def count(self, ended: Sequence[Exchange], end: End) -> list[str]:
        """Exchanges that ended so, but for what `begun` counts. Returns why streams with output have no TPOT, for each."""
        outcome = end[0]
        self.requests[end] += len(ended)
        self.duration_of(outcome).observe_all([x.ended - x.accepted for x in ended if x.ended is not None])
        self.queue.observe_all(
            [0.0 if x.queued is None else x.selected - x.queued for x in ended if x.selected is not None],
        )
        self.connect.observe_all(
            [x.connected - x.connect_began for x in ended if x.connected is not None and x.connect_began is not None],
        )
        self.head.observe_all(
            [x.head_received - x.sent for x in ended if x.head_received is not None and x.sent is not None],
        )
        self.first_byte.observe_all([x.first_byte - x.accepted for x in ended if x.first_byte is not None])
        if outcome != Outcome.COMPLETE:
            self._count_tokenless([x for x in ended if x.stream and x.first_output_written is None], end)
        return self._count_output([(x, x.meter) for x in ended if x.meter is not None], outcome)

    def duration_of(self, outcome: str) -> Histogram:
        histogram = self.duration.get(outcome)
        if histogram is None:
            histogram = self.duration[outcome] = Histogram(B_E2E)
        return histogram

    def begun(self, exchanges: Sequence[Exchange]) -> list[float]:
        """Streams whose first output event has been written. Returns how long that took after it had come, for each."""
        self.ttft.observe_all(
            [x.first_output_written - x.accepted for x in exchanges if x.first_output_written is not None],
        )
        upstream, behind_head, own = [], [], []
        for x in exchanges:
            came = None if x.meter is None else x.meter.first_output
            sent, head, written = x.sent, x.head_received, x.first_output_written
            if came is not None and sent is not None and head is not None and written is not None:
                upstream.append(came - sent)
                behind_head.append(came - head if came > head else 0.0)  # it may have come with the head
                own.append(written - came)
        self.upstream_ttft.observe_all(upstream)
        self.first_event.observe_all(behind_head)
        return own

    def gaps(self, meter: Meter) -> None:
        """Those that came since the last time."""
        counts, total, n = meter.take_itl()
        if n:
            self.itl.add(counts, total)

    def _count_tokenless(self, exchanges: Sequence[Exchange], end: End) -> None:
        if exchanges:
            self.tokenless[fault(*end)] += len(exchanges)
            if end[0] == Outcome.CLIENT_GONE:
                self.abandoned.observe_all([x.ended - x.accepted for x in exchanges if x.ended is not None])

    def _count_output(self, metered: Sequence[tuple[Exchange, Meter]], outcome: str) -> list[str]:
        complete = outcome == Outcome.COMPLETE
        skipped: list[str] = []
        reasons: list[str] = []
        for exchange, meter in metered:
            events, gaps, tokens, source = meter.totals()
            prompt_tokens, reason = meter.prompt_tokens, meter.finish_reason
            self.events += events
            if gaps:
                self.gaps(meter)
            if events > 1:
                self.reads += meter.reads
                if meter.max_gap is not None:
                    self.max_gap.observe(meter.max_gap)
            else:
                self.reads += events
            if events and exchange.stream is not False:
                # A stream that broke off tells nothing of the speed of whole ones.
                tpot = meter.tpot if complete and events > 1 else None
                if tpot is not None:
                    self.tpot["events" if source == "events" else "usage"].observe(tpot)
                else:
                    skipped.append((complete and meter.tpot_skipped) or "not_ok")
            if prompt_tokens:
                self.prompt_tokens["usage"] += prompt_tokens  # nothing else tells of them
                self.cached_tokens += meter.cached_tokens or 0
            if tokens:
                self.output_tokens[source] += tokens
            if reason is not None:
                reasons.append(reason)
            self.opaque += meter.opaque
        for word in set(reasons):
            self.finish_reasons[word if word in FINISH_REASONS else OTHER] += reasons.count(word)
        return skipped


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
