"""The record of one exchange: one client request and all that is done for it.

The handler fills it in as the request walks through the house; whoever observes (metrics, access log, `/-/streams`)
only reads it. Times are seconds on one monotonic clock; None where the moment never came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gateway.core.outcome import Outcome, Phase

if TYPE_CHECKING:
    from gateway.core.meter import Meter


class Exchange:
    """Attributes stand at what the class says until something happens: most of them never change in most exchanges."""

    key: str | None = None  # the name of the API key, never the key
    trace_id: str | None = None  # of the request's traceparent field
    sampled = False  # somebody keeps that trace
    model: str | None = None  # as the client named it: bounded before it becomes a label
    stream: bool | None = None  # whether the request asked for a stream
    backend: str | None = None
    prefill_backend: str | None = None
    status: int | None = None  # of the response as the client got it
    attempts = 0
    migrated_from: str | None = None  # the backends that left it in mid-stream, in their order
    # how it stands, and how it ended
    phase = Phase.READ
    outcome: Outcome | None = None
    code: str | None = None  # the refusal's or the failure's code
    committed = False
    # sizes of bodies, as they stand behind their framing
    bytes_in = 0
    bytes_out = 0
    # times (metrics.md 2.1); `accepted`, t_acc, is when the request's head had been parsed
    body_read: float | None = None  # t_body
    queued: float | None = None  # had to wait to be admitted, from then on
    selected: float | None = None  # t_sel: admitted, and a backend picked
    connect_began: float | None = None  # of the last attempt
    connected: float | None = None
    sent: float | None = None  # t_up: the request is handed to the backend's connection
    head_received: float | None = None  # t_hdr
    first_byte: float | None = None  # t_byte: the first octet of the body
    first_output_written: float | None = None  # t_w[1]
    ended: float | None = None  # t_fin
    # back-pressure
    paused_at: float | None = None
    paused_seconds = 0.0
    meter: Meter | None = None  # what was seen in the response's body
    counted: tuple[int, int, bool] | None = None  # what a scrape has counted already: bytes in, bytes out, whether the TTFT

    def __init__(self, request_id: str, client: str, method: str, path: str, accepted: float):
        self.request_id, self.client, self.method, self.path, self.accepted = request_id, client, method, path, accepted

    def end(self, outcome: Outcome, now: float, code: str | None = None) -> None:
        """Record how it ended. The first word counts: a client that left outranks what followed from it."""
        if self.outcome is None:
            self.outcome, self.ended = outcome, now
            self.code = code or self.code

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} {self.method} {self.path} {self.phase} {self.outcome or 'under way'}>"


class Observer(Protocol):
    """What the data path tells of exchanges. It must not raise, and is called synchronously."""

    def ended(self, exchange: Exchange) -> None: ...

    def paused(self, exchange: Exchange) -> None:
        """The client takes no more: its upstream is held back."""

    def resumed(self, exchange: Exchange, seconds: float) -> None: ...

    def aborted(self, exchange: Exchange, seconds: float) -> None:
        """The client left; `seconds` later its upstream's socket was closed."""

    def retried(self, exchange: Exchange, reason: str) -> None: ...

    def hedged(self, exchange: Exchange, result: str) -> None:
        """A hedge came to its end: it `won`, it `lost`, or both attempts `failed`."""

    def migrated(self, exchange: Exchange, reason: str) -> None:
        """A stream goes on elsewhere, for this reason. What was seen of it so far is still its first backend's."""

    def failed(self, exchange: Exchange, reason: str) -> None:
        """An attempt failed by its backend's fault."""

    def connection(self, backend: str, *, reused: bool) -> None: ...
