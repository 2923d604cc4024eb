"""Where the time of a request goes on this side of the backend, and what of it is the gateway's own.

The client's body, the queue and the connection are waits for somebody else. What is left between a request's head and the
moment at which it is handed to a backend is the gateway's: it looks into the body, and picks. So is the time between an
output event's arrival and its way to the client. None of this depends on a model or a backend, hence no labels; and it is
counted for some dozens of exchanges together, which costs a fraction of looking at one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.exchange import Exchange
from gateway.telemetry.histogram import B_OVH, B_WAIT, Histogram


class Stages:
    __slots__ = ("body", "first_event", "pick", "request")

    def __init__(self) -> None:
        self.body = Histogram(B_WAIT)  # head parsed to body read, as far as it is read before anything is sent
        self.pick = Histogram(B_OVH)  # admitted, until there was a backend to connect to
        self.request = Histogram(B_OVH)  # the gateway's own: head parsed to there, without body and queue
        self.first_event = Histogram(B_OVH)  # the gateway's own: first output event read to handed to the client

    def count(self, ended: Sequence[Exchange]) -> None:
        """Of exchanges that have ended. A second attempt waited for the first one: then there is no telling."""
        self.body.observe_all([x.body_read - x.accepted for x in ended if x.body_read is not None])
        own, pick = [], []
        for x in ended:
            began, selected, read, queued = x.connect_began, x.selected, x.body_read, x.queued
            if began is not None and selected is not None and x.attempts == 1:
                pick.append(began - selected)
                waited = 0.0 if queued is None else selected - queued
                own.append(began - (x.accepted if read is None else read) - waited)
        self.pick.observe_all(pick)
        self.request.observe_all(own)
