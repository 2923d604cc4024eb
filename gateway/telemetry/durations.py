"""What the marks of an exchange come to, in seconds: one set of definitions for the metrics and the access log.

A duration is None where one of its marks never came; it is never guessed.
"""

from __future__ import annotations

from gateway.core.exchange import Exchange
from gateway.core.outcome import Outcome

Seconds = float | None
# queue: waiting to be admitted, 0 where that was at once; connect: of the last attempt; first byte: to the first octet of
# the response's body; ttft: to the first output event, written, of streams only; tpot: between output tokens, of complete
# streams only; total
Durations = tuple[Seconds, Seconds, Seconds, Seconds, Seconds, Seconds]


def ttft(exchange: Exchange) -> Seconds:
    """A response in one piece has no first token that anybody could have seen."""
    written = exchange.first_output_written
    return None if written is None or exchange.stream is False else written - exchange.accepted


def durations(exchange: Exchange) -> Durations:
    accepted, selected, connected = exchange.accepted, exchange.selected, exchange.connected
    began, first_byte, ended = exchange.connect_began, exchange.first_byte, exchange.ended
    written, queued, meter = exchange.first_output_written, exchange.queued, exchange.meter
    left = ended if selected is None else selected  # the queue; by its end, where nobody took it
    return (
        None if left is None or (queued is None and selected is None) else 0.0 if queued is None else left - queued,
        None if connected is None or began is None else connected - began,
        None if first_byte is None else first_byte - accepted,
        None if written is None or exchange.stream is False else written - accepted,  # `ttft`, without a call
        # A stream that broke off tells nothing of the speed of whole ones.
        meter.tpot if meter is not None and exchange.outcome is Outcome.COMPLETE and meter.events > 1 else None,
        None if ended is None else ended - accepted,
    )
