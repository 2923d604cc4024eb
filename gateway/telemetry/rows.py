"""What is kept of an exchange that has ended, until it is counted with others of its model, backend and end: plain numbers.

Rows are made of a hundred exchanges in a row, whoever they belong to, and counted by the column (`series`) when there are some
dozens of one kind, which may take long with many backends; meanwhile some hundred octets wait in the place of an exchange.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.core.exchange import Exchange
from gateway.core.meter import Meter, Totals
from gateway.core.outcome import Outcome
from gateway.telemetry.durations import Seconds

# Of a stream whose first output event has been written: TTFT; the same as the backend is the cause of it; behind its head;
# and from the event's coming to its writing, which is the gateway's own
Begun = tuple[Seconds, Seconds, Seconds, Seconds]
# What a meter saw: its totals; of a stream with output its TPOT, or why it has none; the gap, where it is the only one, and the
# longest; tokens of the prompt, of these from a cache; why the output ended; whether it was too long to be watched
Output = tuple[Totals, Seconds, str | None, Seconds, Seconds, int, int, str | None, bool]
# A row as it is made: to give it names would cost as much as all that is in it
Numbers = tuple[
    Seconds, Seconds, Seconds, Seconds, Seconds, Seconds, Seconds, Seconds,
    Seconds, Seconds, Seconds, Seconds, Output | None,
]  # fmt: skip

_COMPLETE = Outcome.COMPLETE  # looked up once: see core.head
_NOT_BEGUN: Begun = (None, None, None, None)


class Columns(NamedTuple):
    """Of several rows, each in seconds, None where a mark never came."""

    total: tuple[Seconds, ...]
    queue: tuple[Seconds, ...]  # 0 where it was admitted at once
    connect: tuple[Seconds, ...]
    head: tuple[Seconds, ...]  # request sent to response head
    first_byte: tuple[Seconds, ...]
    body: tuple[Seconds, ...]  # head parsed to body read, as far as it is read before anything is sent
    pick: tuple[Seconds, ...]  # admitted, until there was a backend to connect to; of exchanges of one attempt
    own: tuple[Seconds, ...]  # head parsed to there, without body and queue; of exchanges of one attempt
    ttft: tuple[Seconds, ...]
    upstream_ttft: tuple[Seconds, ...]
    behind_head: tuple[Seconds, ...]
    handed_on: tuple[Seconds, ...]
    output: tuple[Output | None, ...]


def numbers(x: Exchange) -> Numbers:
    """Of an exchange that has ended."""
    accepted, ended, selected, queued, read = x.accepted, x.ended, x.selected, x.queued, x.body_read
    began, connected, sent, head, first_byte = x.connect_began, x.connected, x.sent, x.head_received, x.first_byte
    meter, written, waited = x.meter, x.first_output_written, 0.0
    pick = own = queue = None
    if selected is not None:
        queue = waited = 0.0 if queued is None else selected - queued
        if began is not None and x.attempts == 1:  # a second attempt waited for the first one: then there is no telling
            pick = began - selected
            own = began - (accepted if read is None else read) - waited
    ttft, upstream, behind_head, handed_on = _NOT_BEGUN
    if written is not None and x.stream is not False and (x.counted is None or not x.counted[2]):
        ttft, upstream, behind_head, handed_on = begun(x)
    return (
        None if ended is None else ended - accepted,
        queue,
        None if connected is None or began is None else connected - began,
        None if head is None or sent is None else head - sent,
        None if first_byte is None else first_byte - accepted,
        None if read is None else read - accepted,
        pick,
        own,
        ttft,
        upstream,
        behind_head,
        handed_on,
        None if meter is None else _output(x, meter),
    )


def begun(x: Exchange) -> Begun:
    """Of a stream whose first output event has been written."""
    written, sent, head, meter = x.first_output_written, x.sent, x.head_received, x.meter
    assert written is not None
    came = None if meter is None else meter.first_output
    if came is None or sent is None or head is None:
        return (written - x.accepted, None, None, None)
    behind_head = came - head if came > head else 0.0  # it may have come with the head
    return (written - x.accepted, came - sent, behind_head, written - came)


def _output(x: Exchange, meter: Meter) -> Output:
    totals = events, gaps, *_ = meter.totals()
    tpot = skipped = None
    if events and x.stream is not False:
        # A stream that broke off tells nothing of the speed of whole ones.
        tpot, why = meter.pace() if x.outcome is _COMPLETE else (None, "not_ok")
        skipped = why if tpot is None else None  # an estimate is a TPOT, too, under its own label
    return (
        totals,
        tpot,
        skipped,
        meter.itl_sum if gaps == 1 else None,
        meter.max_gap if events > 1 else None,
        meter.prompt_tokens or 0,
        meter.cached_tokens or 0,
        meter.finish_reason,
        meter.opaque,
    )
