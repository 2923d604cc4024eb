"""Where a backend's name leads to, as the system's resolver says: found anew as that grows old, and not waited for where it
is known.

A resolver whose servers say nothing takes ten seconds and more to give up, and an engine is no worse for it: what was found
last holds until something else is found. So

    nothing is known yet          a new connection waits for the look-up, as long as it waits for a connection
    known, but old                ... for `PATIENCE` of it, as most resolvers answer at once; what comes later is for the next
    ... and the last one failed   not at all
    ... and led nowhere, at last  ... for `PATIENCE` of it, whether or not the last look-up failed: nothing is lost by waiting

Each name is looked up once at a time, in a thread of its own: no number of names whose look-up hangs keeps anybody else from
a thread, nor the process from its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

log = logging.getLogger(__name__)

RESOLVED_FOR = 10.0  # seconds that the addresses of a name are taken for granted
PATIENCE = 0.2  # seconds

Addresses: TypeAlias = list[tuple[int, object]]  # address family, address


class Name:
    """`known`: what was found last; None: nothing so far. `found`: called when that may have changed."""

    def __init__(self, host: str, port: int, loop: asyncio.AbstractEventLoop, found: Callable[[], None]):
        self.host, self._port, self._loop, self._found = host, port, loop, found
        self.known: Addresses | None = None
        self._asked = -math.inf  # when the last look-up began
        self._looking: asyncio.Future[None] | None = None  # one under way
        self._error: OSError | None = None  # of the last one
        self._doubted = False  # what is known has led nowhere since it was found

    async def addresses(self) -> Addresses:
        """Raises OSError where none are known, and none can be found."""
        now = time.monotonic()
        if self.known is None:
            await asyncio.wait([self._look_up(now)])
            return self._first()
        looking = self.refresh(now)
        patience = self._asked + PATIENCE - now
        if looking is not None and (self._error is None or self._doubted) and patience > 0:
            await asyncio.wait([looking], timeout=patience)
        return self.known

    def _first(self) -> Addresses:
        """Of those that a look-up has ended for; an error is each one's own."""
        if self.known is None:
            raise OSError(*self._error.args) if self._error is not None else OSError("the name has no address")
        return self.known

    def refresh(self, now: float) -> asyncio.Future[None] | None:
        """Look it up in the background, if it is time; returns the look-up that is under way, if one is."""
        if self._looking is None and now - self._asked < RESOLVED_FOR:
            return None
        return self._look_up(now)

    def may_have_moved(self) -> None:
        """What is known has not led to the backend: it is to be looked up anew."""
        self._asked, self._doubted = -math.inf, True

    def _look_up(self, now: float) -> asyncio.Future[None]:
        if self._looking is not None:
            return self._looking
        looking = self._looking = self._loop.create_future()
        self._asked = now
        try:
            threading.Thread(target=self._ask, name=f"look-up of {self.host}", daemon=True).start()
        except RuntimeError as error:  # as many as there may be
            self._answered(None, OSError(str(error)))
        return looking

    def _ask(self) -> None:
        """In a thread."""
        found: Addresses | None = None
        error: OSError | None = None
        try:
            answer = socket.getaddrinfo(self.host, self._port, type=socket.SOCK_STREAM)
            found = [(family, address) for family, _, _, _, address in answer]
        except OSError as failure:
            error = failure
        except UnicodeError as failure:  # no name at all
            error = OSError(str(failure))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(self._answered, found, error)

    def _answered(self, found: Addresses | None, error: OSError | None) -> None:
        self._error = error
        if found is not None:
            self.known, self._doubted = found, False
        else:
            log.debug("%s could not be looked up: %r", self.host, error)
        looking, self._looking = self._looking, None
        if looking is not None and not looking.done():
            looking.set_result(None)
        if found is not None:
            self._found()
