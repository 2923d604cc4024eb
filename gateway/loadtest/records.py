"""What is written down of a run: one record a request, and what the tester noticed of itself.

Times are seconds since the run's start, by the monotonic clock. A request's marks, in order:

    scheduled   when the schedule says that it arrives
    arrived     when the tester got to it; arrived - scheduled is the tester's own lag
    started     its place under --max-concurrency was had: the clock of TTFT, TPOT and E2EL starts (metrics.md 4.1)
    sent        it was written to a connection; sent - started is the connection's opening
    events      the reads that brought its output events, one time an event
    ended       its terminal event, or the moment when its outcome was decided
"""

from __future__ import annotations

import dataclasses
from array import array
from datetime import datetime
from itertools import pairwise

from gateway.core.outcome import Outcome


def _no_times() -> array[float]:
    return array("d")


@dataclasses.dataclass(slots=True)
class Record:
    """One request. `prompt_len`, `output_len`: tokens that were asked for; the rest is what came of it."""

    index: int
    scheduled: float
    prompt_len: int = 0
    output_len: int | None = None
    arrived: float = 0.0
    started: float = 0.0
    sent: float | None = None
    head: float | None = None  # the response's head had come
    first_byte: float | None = None  # of the body
    first_visible: float | None = None
    events: array[float] = dataclasses.field(default_factory=_no_times)
    ended: float = 0.0
    outcome: Outcome = Outcome.INTERNAL
    status: int | None = None
    error: str = ""
    prompt_tokens: int | None = None  # by the endpoint's usage
    output_tokens: int = 0
    token_source: str = "events"  # usage, continuous, token_ids, events
    choices: int = 0
    reads: int = 0  # that brought output events
    tpot: float | None = None  # (last - first event) / (N - tokens of the first event); metrics.md 2.3
    tpot_skipped: str | None = "incomplete"
    fresh: bool = True  # the connection was opened for it
    body: bytes = b""  # the response's, where it is to be kept

    @property
    def ttft(self) -> float | None:
        return self.events[0] - self.started if self.events else None

    @property
    def latency(self) -> float | None:
        """vLLM's E2EL: to the last output event, not to the end of the stream. Of an answer in one piece, to its end."""
        if self.events:
            return self.events[-1] - self.started
        return self.duration if self.outcome is Outcome.COMPLETE else None

    @property
    def duration(self) -> float:
        """To the terminal event, or to whatever else ended it."""
        return self.ended - self.started

    @property
    def queued(self) -> float:
        """Held back by --max-concurrency."""
        return self.started - self.arrived

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.events)]

    @property
    def tpot_vllm(self) -> float | None:
        """vLLM's TPOT, (E2EL - TTFT) / (N - 1), where N > 1."""
        if self.output_tokens <= 1 or not self.events:
            return None
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)

    @property
    def finished(self) -> bool:
        """It came to an end of its own: Ctrl-C did not cut it."""
        return self.outcome is not Outcome.CLIENT_GONE


@dataclasses.dataclass(slots=True)
class Watch:
    """What the tester noticed of itself during a run."""

    loop_lags: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class Run:
    """One run at one rate. `records`: of each endpoint, by index; several endpoints had the same schedule, in pairs."""

    rate: float  # requests a second that were asked for, of each endpoint; inf: all at once
    asked: int  # requests, of each endpoint
    records: list[list[Record]]
    began: datetime
    duration: float = 0.0  # to the last request's end
    watch: Watch = dataclasses.field(default_factory=Watch)
    interrupted: bool = False
    rates: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # a ramp's whole rates, and when each began
