"""The relay on its own: what passes at once, what the meter is shown later, and that nothing passes behind the end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gateway.core.dialects import chat
from gateway.core.exchange import Exchange
from gateway.core.framing import LAST_CHUNK, ChunkedReader, frame
from gateway.core.head import Framing
from gateway.core.meter import Meter
from gateway.net.lane import USUAL_MOST
from gateway.net.relay import Relay
from gateway.net.upstream import Connection
from gateway.telemetry.histogram import B_TPOT
from tests.support import script as s


class _Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, octets: bytes) -> None:
        self.written.append(octets)


class _Client:
    def __init__(self) -> None:
        self.transport, self.loop = _Transport(), asyncio.get_running_loop()


def _relay(connection: Connection | None = None) -> tuple[Relay, _Transport, Meter]:
    client: Any = _Client()
    pool: Any = None
    connection = connection or Connection(pool, asyncio.get_running_loop())
    observer: Any = None
    meter = Meter(chat, B_TPOT, True)
    exchange = Exchange("id", "127.0.0.1", "POST", "/v1/chat/completions", 0.0)
    relay = Relay(exchange, client, connection, ChunkedReader(), Framing.CHUNKED, meter, observer, 0.0)
    connection.hand_over(relay)
    return relay, client.transport, meter


def pass_words(connection: Connection, word: str) -> None:
    """Six events that differ only in their text: the first few are learnt from, the others are usual."""
    for i in range(6):
        connection.data_received(frame(s.delta(f"{word}{i}")))


async def test_usual_events_pass_as_the_very_octets_and_are_all_counted() -> None:
    """Each read is written as it came, and in the end the meter has seen every event."""
    relay, transport, meter = _relay()
    reads = [frame(s.delta(f"word{i:04d}")) for i in range(3 * USUAL_MOST + 5)]
    for read in reads:
        relay.connection.data_received(read)
    assert all(a is b for a, b in zip(transport.written, reads, strict=True))
    relay.connection.data_received(b"".join(map(frame, s.FINISHED)) + LAST_CHUNK)
    await asyncio.wait_for(asyncio.shield(relay.done), 1)
    # the chunk that ends the stream carries no text, and no role: by metrics.md 2.2 it is an output event too
    assert meter.events == len(reads) + 1
    assert meter.terminal and meter.finish_reason == "stop"
    assert relay.body_octets == sum(len(s.delta(f"word{i:04d}")) for i in range(len(reads))) + sum(map(len, s.FINISHED))


async def test_odd_texts_of_a_usual_length_are_decoded() -> None:
    """A text with a quote or a backslash passes at once like the others, and is read by the decoder afterwards."""
    relay, transport, meter = _relay()
    words = ["aaaaaaaa", "bbbbbbbb", "cccccccc", 'd\\"eeeee', "ffffffff", "ggggg\\\\g"]
    reads = [frame(s.delta("aaaaaaaa").replace(b"aaaaaaaa", word.encode())) for word in words]
    for read in reads:
        relay.connection.data_received(read)
    relay.settle()
    assert transport.written == reads
    assert meter.events == len(words)


async def test_nothing_passes_behind_the_end() -> None:
    """A TLS upstream can bring its records one by one: chunks of a usual length behind the last chunk are nobody's."""
    relay, transport, _ = _relay()
    pass_words(relay.connection, "word")
    relay.connection.data_received(b"".join(map(frame, s.FINISHED)) + LAST_CHUNK)
    passed = len(transport.written)
    relay.connection.data_received(frame(s.delta("evil0")))
    relay.connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    assert len(transport.written) == passed
    assert relay.reader.extra, "the connection would be taken for clean"


async def test_a_relay_that_has_let_go_leaves_the_connection_alone() -> None:
    """Its client is still taking the end of its answer, and the connection serves another one already."""
    first, _, meter = _relay()
    connection = first.connection
    pass_words(connection, "word")
    connection.data_received(b"".join(map(frame, s.FINISHED)) + LAST_CHUNK)
    first.let_go()
    counted = meter.events
    second, _, other = _relay(connection)
    pass_words(connection, "next")
    assert connection.times, "nothing has been put off: this tests nothing"
    first.settle()
    first.close()
    assert meter.events == counted
    second.settle()
    assert other.events == 6


async def test_a_relay_that_is_closed_has_shown_everything() -> None:
    relay, _, meter = _relay()
    pass_words(relay.connection, "word")
    relay.close()
    assert meter.events == 6


async def test_to_settle_does_not_set_the_idle_clock_back() -> None:
    relay, _, _ = _relay()
    pass_words(relay.connection, "word")
    relay.last = resumed = time.monotonic() + 1  # as `resume` does
    relay.settle()
    assert relay.last == resumed
