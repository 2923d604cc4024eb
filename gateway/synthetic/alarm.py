"""Waking at a moment, to the precision of the kernel's timers.

An event loop's own timers count whole milliseconds (uvloop's, and epoll's timeout), and a stream of 50 tokens a second
would be off by up to one at each. One timerfd serves all who wait: it is set to the earliest moment, and the loop
watches it like a socket. Moments are absolute, on the monotonic clock (`time.monotonic`), in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import math
import os
import time
from collections.abc import Callable
from typing import Final

_CLOCK_MONOTONIC: Final = time.CLOCK_MONOTONIC
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # timerfd's own flags have these values
_ABSOLUTE: Final = 1
# Moments that are closer together are rung for at once: thousands of streams must not cost a wake-up each.
_GRAIN: Final = 0.0002
# Later than anyone waits; the kernel takes no more than its counter holds.
_NEVER: Final = 10 * 365 * 86400.0


class _Spec(ctypes.Structure):
    """struct itimerspec: the interval, which is none, and the moment."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class Wake:
    """One who waits. `cancel` is all there is to do with it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None] | None):
        self.call = call

    def cancel(self) -> None:
        self.call = None


class Alarm:
    """`at(moment, call)` calls back then. To be closed before its loop is."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        self._spec = _Spec()
        self._pointer = ctypes.byref(self._spec)
        self._settime = self._libc.timerfd_settime
        # Compared in C; the number keeps the order of those that ask for the same moment.
        self._waiting: list[tuple[float, int, Wake]] = []
        self._numbers = itertools.count()
        self._set = _NEVER
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.ring)

    def at(self, when: float, call: Callable[[], None]) -> Wake:
        """A moment that is past comes with the loop's next round."""
        wake = Wake(call)
        heapq.heappush(self._waiting, (when, next(self._numbers), wake))
        if when < self._set:
            self._arm(when)
        return wake

    def catch_up(self) -> None:
        """Call those whose moment has passed, though the loop has not come round: in the midst of long work."""
        if self._set <= time.monotonic():
            self.ring()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._waiting.clear()

    def _arm(self, when: float) -> None:
        self._set = when
        spec = self._spec
        seconds = int(when)
        # Nothing but zero would disarm it: a moment in the first nanosecond since boot is not asked for.
        spec.s, spec.ns = seconds, int((when - seconds) * 1e9)
        self._settime(self._fd, _ABSOLUTE, self._pointer, None)

    def ring(self) -> None:
        """Call those whose moment has come, each once: who asks again from within his call has another round."""
        waiting, due = self._waiting, []
        now = time.monotonic()
        while waiting and (waiting[0][0] <= now or waiting[0][2].call is None):
            due.append(heapq.heappop(waiting)[2])
        self._set = -math.inf  # nobody sets the timer in the meantime
        for wake in due:
            if wake.call is not None:
                self._call(wake.call)
        if waiting:
            # Setting it anew makes the descriptor quiet, as reading it would. Who is behind is not kept waiting.
            first = waiting[0][0]
            self._arm(first if first <= now else max(first, now + _GRAIN))
        else:
            self._set = _NEVER
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # of one of them: the others are still to be called
            self._loop.call_exception_handler({"message": "a call at its moment failed", "exception": error})
