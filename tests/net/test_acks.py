"""Acknowledgements that wait: for a backend that sends at once, and never for one that waits for them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from gateway.net import acks
from gateway.net.acks import EVENTS, JOINED, UNPROVEN, Acks, Manner, State
from tests.support import script as s
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

NEVER = -1.0
TRIALS = [
    # events, segments, acknowledged, and what follows, for how long
    (EVENTS - 1, EVENTS - 1, 10, State.TRIAL, NEVER),  # not long enough
    (EVENTS, EVENTS, EVENTS // 2, State.DELAYED, NEVER),
    (EVENTS, EVENTS + 9, EVENTS // 2, State.DELAYED, NEVER),  # an event in two segments
    (EVENTS, EVENTS, EVENTS, State.EAGER, UNPROVEN),  # each was acknowledged: it may have waited for that
    (8, 1, 1, State.EAGER, JOINED),
    (EVENTS, EVENTS // 2, 2, State.EAGER, JOINED),
]


@pytest.mark.parametrize(("events", "segments", "acknowledged", "state", "lasts"), TRIALS)
def test_what_a_trial_says(events: int, segments: int, acknowledged: int, state: State, lasts: float) -> None:
    manner = Manner()
    assert manner.delays(0.0)
    manner.tried(events, segments, acknowledged, 100.0)
    assert manner.state is state
    assert manner.delays(100.0) is (state is not State.EAGER)
    if state is State.EAGER:
        assert not manner.delays(100.0 + lasts - 1)
        assert manner.delays(100.0 + lasts)
        assert manner.state is State.TRIAL


def test_what_was_proven_may_change() -> None:
    """Another engine at the same address: what it joins says so. A slow stream says nothing of it."""
    manner = Manner()
    manner.tried(EVENTS, EVENTS, EVENTS // 2, 0.0)
    manner.tried(EVENTS, EVENTS, EVENTS, 0.0)
    assert manner.delays(0.0)
    manner.tried(9, 2, 2, 0.0)
    assert not manner.delays(0.0)


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A reader and a writer, in natural manners."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as reader:
        writer, _ = listener.accept()
        with writer:
            writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(50):  # the kernel's own mood at a connection's start
                exchange(pair_ := (reader, writer))
            yield pair_


def exchange(pair: Pair) -> None:
    pair[1].sendall(b"x" * 100)
    assert len(pair[0].recv(1000)) == 100


def test_every_other_segment_is_acknowledged(pair: Pair) -> None:
    manner = Manner()
    of = Acks(manner, pair[0])
    of.begin(0.0)
    before = acks.counts(pair[0])
    for _ in range(4):
        for _ in range(EVENTS):
            exchange(pair)
        of.came(EVENTS, 0.0)
    assert manner.state is State.DELAYED
    after = acks.counts(pair[0])
    assert after.received - before.received == 4 * EVENTS
    assert after.sent - before.sent < 4 * EVENTS * 0.8


def test_a_writer_that_waits_for_them_gets_them(pair: Pair) -> None:
    """With Nagle's algorithm on, it joins what it holds back: noticed at the first such read, and never done again."""
    reader, writer = pair
    writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
    manner = Manner()
    of = Acks(manner, reader)
    of.begin(0.0)

    def write() -> None:
        for _ in range(200):
            writer.sendall(b"x" * 100)
            time.sleep(0.003)

    thread = threading.Thread(target=write)
    thread.start()
    got, joined = 0, 0
    while got < 200 * 100:
        data = reader.recv(65536)
        got += len(data)
        joined += len(data) > 100 and manner.state is not State.EAGER
        of.came(len(data) // 100, 0.0, joined=len(data) > 100)
    thread.join()
    assert manner.state is State.EAGER
    assert joined <= 3


def test_closed_meanwhile() -> None:
    with socket.socket() as closed:
        pass
    of = Acks(Manner(), closed)
    of.begin(0.0)
    of.came(EVENTS, 0.0)


async def test_streams_of_a_backend_with_nagles_algorithm(
    start_gateway: Callable[..., Awaitable[Gateway]],
) -> None:
    """After the first of them none is late: all events come whole and by themselves."""
    events = [s.delta(f"{number:03d}") for number in range(150)]

    async def lazy(wire: HttpWire, request: Message) -> None:
        wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        await wire.send(s.SSE_HEAD)
        for event in events:
            await wire.send(s.chunk(event))
            await asyncio.sleep(0.004)
        await wire.send(s.chunk(s.delta("", finish="stop")) + s.chunk(s.DONE) + s.LAST)

    upstream = RawUpstream(lazy)
    await upstream.start()
    try:
        gateway = await start_gateway(backends=[upstream.url])
        bodies = [(await gateway.ask()).body for _ in range(2)]
        assert bodies == [b"".join(events) + s.delta("", finish="stop") + s.DONE] * 2
    finally:
        await upstream.stop()
