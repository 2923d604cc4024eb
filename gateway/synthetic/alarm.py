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

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None] | None):
        self.when, self.call = when, call

    def cancel(self) -> None:
        self.call = None

    def __lt__(self, other: Wake) -> bool:
        return self.when < other.when


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
        self._waiting: list[Wake] = []
        self._set = _NEVER
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)

    def at(self, when: float, call: Callable[[], None]) -> Wake:
        """A moment that is past comes with the loop's next round."""
        wake = Wake(when, call)
        heapq.heappush(self._waiting, wake)
        if when < self._set:
            self._arm(when)
        return wake

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
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, self._pointer, None)

    def _ring(self) -> None:
        waiting = self._waiting
        now = time.monotonic()
        while waiting and (waiting[0].call is None or waiting[0].when <= now):
            call = heapq.heappop(waiting).call
            if call is not None:
                call()
        if waiting:
            # Setting it anew makes the descriptor quiet, as reading it would.
            self._arm(max(waiting[0].when, now + _GRAIN))
        else:
            self._set = _NEVER
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)
