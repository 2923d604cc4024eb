"""Where the time of a request goes on this side of the backend, and what of it is the gateway's own.

The client's body, the queue and the connection are waits for somebody else. What is left between a request's head and the
moment at which it is handed to a backend is the gateway's: it looks into the body, and picks. So is the time between an
output event's arrival and its way to the client. None of this depends on a model or a backend, hence no labels; and it is
counted for some dozens of exchanges together, which costs a fraction of looking at one after the other.
"""

from __future__ import annotations

from gateway.telemetry.histogram import B_OVH, B_WAIT, Histogram
from gateway.telemetry.rows import Columns
from gateway.telemetry.series import present


class Stages:
    __slots__ = ("body", "first_event", "pick", "request")

    def __init__(self) -> None:
        self.body = Histogram(B_WAIT)  # head parsed to body read, as far as it is read before anything is sent
        self.pick = Histogram(B_OVH)  # admitted, until there was a backend to connect to
        self.request = Histogram(B_OVH)  # the gateway's own: head parsed to there, without body and queue
        self.first_event = Histogram(B_OVH)  # the gateway's own: first output event read to handed to the client

    def count(self, of: Columns) -> None:
        self.body.observe_all(present(of.body))
        self.pick.observe_all(present(of.pick))
        self.request.observe_all(present(of.own))
        self.first_event.observe_all(present(of.handed_on))
