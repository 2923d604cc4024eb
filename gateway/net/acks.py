"""How a backend's stream is acknowledged: every other segment, where that is known to hold nothing back.

Linux answers each small segment of a stream as soon as it is read, and to send an acknowledgement is a tenth of what
relaying a token costs. It can be told to let them wait for company, as it does by itself where both ends talk in turn
(tcp(7), TCP_QUICKACK). A backend that has left Nagle's algorithm on (RFC 9293 section 3.7.4) would then hold its next
event back until the acknowledgement comes, 40 ms later. Engines do not (asyncio, and so uvicorn, sets TCP_NODELAY), but
it cannot be asked; so the first stream of a backend is a trial, and what came of it holds for the others:

    TRIAL    `EVENTS` events came, many of them with no acknowledgement before the next    DELAYED
    TRIAL    as many, with one for each: it proves nothing                                  EAGER, for a minute
    any      events came that the backend had joined into one segment                       EAGER, for ten minutes
    EAGER    that time has passed                                                           TRIAL
"""

from __future__ import annotations

import contextlib
import enum
import math
import socket
import struct
from typing import NamedTuple

EVENTS = 64  # of a trial; as many as a lane lets pass before they are looked at
JOINED, UNPROVEN = 600.0, 60.0  # seconds that EAGER lasts
_TCP = int(socket.IPPROTO_TCP)
_INFO = struct.Struct("136xI12xI")  # Linux's struct tcp_info: segments sent, and segments received that held data
_MOST = 0.8  # acknowledgements a segment
_QUEUED = 2  # segments that had come before a trial began, whose events are read in it


class State(enum.Enum):
    TRIAL = enum.auto()
    DELAYED = enum.auto()
    EAGER = enum.auto()


class Manner:
    """What is known of one backend."""

    __slots__ = ("_until", "state")

    def __init__(self) -> None:
        self.state = State.TRIAL
        self._until = math.inf

    def delays(self, now: float) -> bool:
        """Whether acknowledgements may wait, or are to be tried with."""
        if self.state is State.EAGER and now >= self._until:
            self.state = State.TRIAL
        return self.state is not State.EAGER

    def tried(self, events: int, segments: int, acknowledged: int, now: float) -> None:
        """So many events have come on one connection, in so many segments, while acknowledgements waited."""
        if segments + _QUEUED < events:
            self.state, self._until = State.EAGER, now + JOINED
        elif self.state is State.TRIAL and events >= EVENTS:
            proven = acknowledged <= segments * _MOST
            self.state, self._until = (State.DELAYED, math.inf) if proven else (State.EAGER, now + UNPROVEN)


class Counts(NamedTuple):
    sent: int  # segments: nearly all of them acknowledgements, once the request is sent
    received: int  # segments with data


class Acks:
    """Of one connection, from the moment that its stream has found its shape."""

    __slots__ = ("_began", "_events", "_manner", "_sock")

    def __init__(self, manner: Manner, sock: socket.socket):
        self._manner, self._sock = manner, sock
        self._began: Counts | None = None  # of a trial
        self._events = 0

    def begin(self, now: float) -> None:
        """A stream's usual events begin."""
        self._began, self._events = None, 0
        if self._manner.delays(now):
            self._wait()

    def _wait(self) -> None:
        self._began, self._events = counts(self._sock), 0
        delay(self._sock, True)

    def came(self, events: int, now: float, *, joined: bool = False) -> None:
        """So many events have come since the last call. `joined`: in one read."""
        self._events += events
        if self._events < EVENTS and not joined:
            return
        if self._began is None:
            return
        found = counts(self._sock)
        self._manner.tried(self._events, found.received - self._began.received, found.sent - self._began.sent, now)
        if not self._manner.delays(now):
            self._began = None
            delay(self._sock, False)
        elif self._events >= EVENTS:
            self._wait()  # the kernel forgets


def counts(sock: socket.socket) -> Counts:
    with contextlib.suppress(OSError):  # closed meanwhile
        return Counts(*_INFO.unpack(sock.getsockopt(_TCP, socket.TCP_INFO, _INFO.size)))
    return Counts(0, 0)


def delay(sock: socket.socket, on: bool) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(_TCP, socket.TCP_QUICKACK, not on)
