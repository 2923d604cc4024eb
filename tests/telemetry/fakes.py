"""An exchange and what a meter saw of it, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from gateway.core.exchange import Exchange
from gateway.core.meter import Meter
from gateway.core.outcome import Outcome, Phase
from gateway.telemetry.histogram import B_TPOT, Histogram
from gateway.telemetry.metrics import BackendSample, Metrics, Sources

ACCEPTED = 100.0


class FakeMeter:
    def __init__(self, gaps: Sequence[float] = (), **fields: Any):
        self.first_output: float | None = ACCEPTED + 0.4
        self.last_output: float | None = ACCEPTED + 0.4
        self.events = 2 if gaps or "tpot" in fields else 1
        self.tpot: float | None = None
        self.tpot_skipped: str | None = "single_token"
        self.token_source = "usage"
        self.output_tokens: int | None = 1
        self.prompt_tokens: int | None = 7
        self.finish_reason: str | None = "stop"
        self.cached_tokens: int | None = None
        self.opaque = False
        self.gaps = list(gaps)
        self.max_gap = max(gaps, default=None)
        for name, value in fields.items():
            setattr(self, name, value)
        self.reads: int = fields.get("reads", self.events)

    def totals(self) -> tuple[int, int, int, int | None, str]:
        return self.events, len(self.gaps), self.reads, self.output_tokens, self.token_source

    def pace(self) -> tuple[float | None, str | None]:
        return self.tpot, self.tpot_skipped

    @property
    def itl_sum(self) -> float:
        return sum(self.gaps)

    def take_itl(self) -> tuple[list[int], float, int]:
        taken, gaps = Histogram(B_TPOT), self.gaps
        self.gaps = []
        for gap in gaps:
            taken.observe(gap)
        return taken.counts, taken.sum, len(gaps)


def stream(meter: FakeMeter | Meter | None = None, **fields: Any) -> Exchange:
    """A stream under way: its first token was written after half a second."""
    exchange = Exchange("req-1", "10.1.2.3:4567", "POST", "/v1/chat/completions", ACCEPTED)
    exchange.model, exchange.backend, exchange.stream, exchange.status, exchange.attempts = "llama", "b1", True, 200, 1
    exchange.phase = Phase.STREAM
    exchange.body_read, exchange.queued, exchange.selected = ACCEPTED + 0.01, ACCEPTED + 0.011, ACCEPTED + 0.031
    exchange.connect_began, exchange.connected, exchange.sent = ACCEPTED + 0.0312, ACCEPTED + 0.0332, ACCEPTED + 0.034
    exchange.head_received, exchange.first_byte = ACCEPTED + 0.3, ACCEPTED + 0.31
    exchange.first_output_written = ACCEPTED + 0.5
    exchange.bytes_in, exchange.bytes_out = 120, 900
    exchange.meter = cast("Meter", FakeMeter() if meter is None else meter)
    for name, value in fields.items():
        setattr(exchange, name, value)
    return exchange


def ended(exchange: Exchange, outcome: Outcome = Outcome.COMPLETE, code: str | None = None) -> Exchange:
    exchange.end(outcome, ACCEPTED + 2, code)
    return exchange


def refused(code: str = "unknown_model", model: str | None = None) -> Exchange:
    exchange = Exchange("req-2", "10.1.2.3:4567", "POST", "/v1/chat/completions", ACCEPTED)
    exchange.model, exchange.status = model, 404
    return ended(exchange, Outcome.REFUSED, code)


class House:
    """All that a scrape reads beside the counters."""

    def __init__(self) -> None:
        self.models: list[str] = ["llama", "qwen"]
        self.live: list[Exchange] = []
        self.backends = [BackendSample("b1", True, "up", 3, 5), BackendSample("b2", False, "down", 0, 0)]

    def sources(self) -> Sources:
        return Sources(lambda: self.models, lambda: self.live, lambda: self.backends, lambda: 4, lambda: [65000, 0, 536])

    def metrics(self, **options: Any) -> Metrics:
        return Metrics(self.sources(), wall=lambda: 1_800_000_000.0, version="1.2.3", **options)
