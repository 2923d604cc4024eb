"""coalesce: small events that come soon after one another go out in one write, for many slow clients' sake.

The octets are the same, and so are the times that the meter sees; only the packets are fewer. What is as large as `most`,
or has waited `delay` seconds, goes at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Coalescer:
    """Stands in for a transport's `write`. Whoever has something to say that may not wait calls `flush` after it."""

    __slots__ = ("_delay", "_held", "_loop", "_most", "_size", "_timer", "_write")

    def __init__(self, write: Callable[[bytes], None], delay: float, most: int):
        self._write, self._delay, self._most = write, delay, most
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, octets: bytes) -> None:
        self._held.append(octets)
        self._size += len(octets)
        if self._size >= self._most:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._delay, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            octets, self._held, self._size = b"".join(self._held), [], 0
            self._write(octets)
