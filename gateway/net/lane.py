"""The short way of the usual event: one plain chunk that differs from one before it only in its text.

It is told by its length and its two ends, which hold its framing whole, so that it can pass at once. What its text says
is looked at later, for some dozens of events together (`net.relay` takes them over with the times at which they came),
since what is done many times in a row costs a fraction of what is done now and then. The relay opens the way for the
lengths that it has learnt, and closes it; while it is closed, all that comes is unusual.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

USUAL_MOST = 64  # usual events that pass before they are looked at
LENGTHS_MOST = 256  # lengths of usual events that are told apart

_clock = time.monotonic


def _nowhere(octets: bytes) -> None:
    raise AssertionError("a lane was opened that leads nowhere")


class Lane(asyncio.Protocol):
    """What a connection to a backend begins every read with."""

    __slots__ = ("end", "pass_on", "texts", "times", "usual")

    def __init__(self) -> None:
        self.pass_on: Callable[[bytes], None] = _nowhere  # to the client
        self.usual: dict[int, bytes] = {}  # how an event of each length begins; never with nothing
        self.end = b""  # how they all end; nor with nothing
        self.texts: list[bytes] = []  # that have passed, and nobody has looked at
        self.times: list[float] = []  # when each was read

    def data_received(self, data: bytes) -> None:
        now = _clock()
        begin = self.usual.get(len(data))
        if begin is not None:
            # What is not there cannot be removed: then the very same object comes back. Half the cost of startswith.
            rest = data.removeprefix(begin)
            text = rest.removesuffix(self.end)
            if rest is not data and text is not rest:
                pass_on = self.pass_on
                pass_on(data)
                self.texts.append(text)
                times = self.times
                times.append(now)
                if len(times) == USUAL_MOST:
                    self.settle()
                return
        self.unusual(data, now)

    def settle(self) -> None:
        """Look at what has passed: it is as many as may pass unlooked at."""
        raise NotImplementedError

    def unusual(self, data: bytes, now: float) -> None:
        """All else."""
        raise NotImplementedError

    def expect(self, begin: bytes, size: int) -> None:
        """An event of so many octets, if it has these two ends, is a usual one from now on."""
        if len(self.usual) < LENGTHS_MOST:
            self.usual[size] = begin

    def open_lane(self, end: bytes, pass_on: Callable[[bytes], None]) -> None:
        """Usual events will end so, and go there. None is expected yet."""
        self.usual, self.end, self.pass_on = {}, end, pass_on

    def close_lane(self) -> None:
        """Nothing is usual any more."""
        if self.usual:
            self.usual = {}
        self.pass_on = _nowhere

    def take_passed(self) -> tuple[list[bytes], list[float]]:
        """The texts that have passed since the last call, and when each came."""
        passed = self.texts, self.times
        self.texts, self.times = [], []
        return passed
