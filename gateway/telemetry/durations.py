"""What the marks of an exchange come to, in seconds: one set of definitions for the metrics and the access log.

A duration is None where one of its marks never came; it is never guessed.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.core.exchange import Exchange
from gateway.core.outcome import Outcome


class Durations(NamedTuple):
    queue: float | None  # the body was there, until a backend was picked
    connect: float | None  # of the last attempt
    first_byte: float | None  # to the first octet of the response's body
    ttft: float | None  # to the first output event, written: streams only
    tpot: float | None  # between output tokens: complete streams only
    total: float | None


def ttft(exchange: Exchange) -> float | None:
    """A response in one piece has no first token that anybody could have seen."""
    written = exchange.first_output_written
    if written is None or exchange.stream is False:
        return None
    return written - exchange.accepted


def durations(exchange: Exchange) -> Durations:
    accepted, selected, connected = exchange.accepted, exchange.selected, exchange.connected
    began, first_byte, ended = exchange.connect_began, exchange.first_byte, exchange.ended
    body_read = accepted if exchange.body_read is None else exchange.body_read  # no body: read with its head
    meter = exchange.meter
    return Durations(
        # Picked before the whole body came: nobody waited.
        queue=None if selected is None else selected - body_read if selected > body_read else 0.0,
        connect=None if connected is None or began is None else connected - began,
        first_byte=None if first_byte is None else first_byte - accepted,
        ttft=ttft(exchange),
        # A stream that broke off tells nothing of the speed of whole ones.
        tpot=meter.tpot if meter is not None and meter.events > 1 and exchange.outcome is Outcome.COMPLETE else None,
        total=None if ended is None else ended - accepted,
    )
