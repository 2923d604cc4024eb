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
    __slots__ = (
        "accepted",
        "attempts",
        "backend",
        "body_read",
        "bytes_in",
        "bytes_out",
        "client",
        "code",
        "committed",
        "connect_began",
        "connected",
        "counted",
        "ended",
        "first_byte",
        "first_output_written",
        "head_received",
        "key",
        "meter",
        "method",
        "model",
        "outcome",
        "path",
        "paused_at",
        "paused_seconds",
        "phase",
        "prefill_backend",
        "request_id",
        "selected",
        "sent",
        "status",
        "stream",
        "trace_id",
    )

    def __init__(self, request_id: str, client: str, method: str, path: str, accepted: float):
        self.request_id, self.client, self.method, self.path = request_id, client, method, path
        self.key: str | None = None  # the name of the API key, never the key
        self.trace_id: str | None = None
        self.model: str | None = None  # as the client named it: bounded before it becomes a label
        self.stream: bool | None = None  # whether the request asked for a stream
        self.backend: str | None = None
        self.prefill_backend: str | None = None
        self.status: int | None = None  # of the response as the client got it
        self.attempts = 0
        # how it stands, and how it ended
        self.phase = Phase.READ
        self.outcome: Outcome | None = None
        self.code: str | None = None  # the refusal's or the failure's code
        self.committed = False
        # sizes of bodies, as they stand behind their framing
        self.bytes_in = 0
        self.bytes_out = 0
        # times (metrics.md 2.1)
        self.accepted = accepted  # t_acc: the request's head has been parsed
        self.body_read: float | None = None  # t_body
        self.selected: float | None = None  # t_sel: admitted, and a backend picked
        self.connect_began: float | None = None  # of the last attempt
        self.connected: float | None = None
        self.sent: float | None = None  # t_up: the request is handed to the backend's connection
        self.head_received: float | None = None  # t_hdr
        self.first_byte: float | None = None  # t_byte: the first octet of the body
        self.first_output_written: float | None = None  # t_w[1]
        self.ended: float | None = None  # t_fin
        # back-pressure
        self.paused_at: float | None = None
        self.paused_seconds = 0.0
        self.meter: Meter | None = None  # what was seen in the response's body
        # what the metrics have counted of it, a scrape being able to come first: bytes in, bytes out, its TTFT
        self.counted: tuple[int, int, bool] = (0, 0, False)

    def end(self, outcome: Outcome, now: float, code: str | None = None) -> None:
        """Record how it ended. The first word counts: a client that left outranks what followed from it."""
        if self.outcome is None:
            self.outcome, self.ended = outcome, now
            self.code = code or self.code

    def __repr__(self) -> str:
        return f"<Exchange {self.request_id} {self.method} {self.path} {self.phase} {self.outcome or 'under way'}>"


class Observer(Protocol):
    """What the data path tells of exchanges. It must not raise, and is called synchronously."""

    def began(self, exchange: Exchange) -> None: ...

    def ended(self, exchange: Exchange) -> None: ...

    def paused(self, exchange: Exchange) -> None:
        """The client takes no more: its upstream is held back."""

    def resumed(self, exchange: Exchange, seconds: float) -> None: ...

    def aborted(self, exchange: Exchange, seconds: float) -> None:
        """The client left; `seconds` later its upstream's socket was closed."""

    def retried(self, exchange: Exchange, reason: str) -> None: ...

    def failed(self, exchange: Exchange, reason: str) -> None:
        """An attempt failed by its backend's fault."""

    def connection(self, backend: str, *, reused: bool) -> None: ...
