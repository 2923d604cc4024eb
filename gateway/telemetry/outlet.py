"""Standard error, written to without ever waiting for whoever reads it.

The log is written on the event loop's thread: a pipe whose reader has stopped would stop every stream with it. So nothing
is written but what is taken at once. What is not taken is kept, up to a bound, and written when it is; past the bound lines
are lost, and how many is said as soon as there is room again.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from collections.abc import Callable

KEPT_MOST = 1 << 20  # octets that wait for a reader
# Octets that a pipe takes at once when it takes any (pipe(7), PIPE_BUF).
SLICE = select.PIPE_BUF

Later = Callable[[Callable[[], None]], object]


class Outlet:
    """`later`, once there is an event loop, runs a callback a little later: it looks again whether there is room."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending = bytearray()
        self._lost = 0  # lines, of which nothing has been said
        self._waiting = False
        self.later: Later | None = None
        self._poll: select.poll | None = None
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a file takes all there is
            self._poll = select.poll()
            self._poll.register(fd, select.POLLOUT)

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        if len(self._pending) + len(data) > KEPT_MOST:
            self._lost += text.count("\n")
        else:
            self._pending += data
        return len(text)

    def flush(self) -> None:
        """Write what is taken at once. Raises OSError where nobody can ever take it."""
        try:
            self._drain(0.0)
        except OSError:
            self._pending.clear()
            raise
        if self._pending and self.later is not None and not self._waiting:
            self._waiting = True
            self.later(self._again)

    def finish(self, seconds: float) -> None:
        """The last words: a reader that is merely slow is waited for so long."""
        try:
            self._drain(seconds)
        except OSError:
            self._pending.clear()

    def _again(self) -> None:
        self._waiting = False
        with contextlib.suppress(OSError):
            self.flush()

    def _drain(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._pending or self._lost:
            if not self._pending:
                self._pending += b"%d lines of the log were lost here: whoever reads it did not keep up\n" % self._lost
                self._lost = 0
            if self._poll is None:
                taken = os.write(self._fd, self._pending)
            elif self._poll.poll(max(until - time.monotonic(), 0.0) * 1000):
                taken = os.write(self._fd, self._pending[:SLICE])
            else:
                return
            del self._pending[:taken]
