"""What outlives its exchange, so that no KV is left behind: release legs, and decode legs that go on without a client.

Whoever leaves between prefill's answer and decode's first octet leaves KV on the prefill engine, which nobody but a decode
engine can have it free: by fetching it. So the gateway asks for one token in the client's stead (release), or lets the request
that is under way go on until it has begun (detach). Whoever leaves while prefill computes may do so in the very moment in which
it answers: so its connection is ended on our side alone, and what it has written by then is heard (hear). All of them end by
themselves, are bounded in number or in time, and are waited for when the gateway stops. What cannot be freed is counted: it is
gone when the engine's own time for it is over.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.core.backend import Backend, Holding, Lease
from gateway.core.dialects import Dialect
from gateway.core.disagg.signs import turned_down
from gateway.core.head import ResponseHead
from gateway.errors import Refusal, forget
from gateway.net.fetch import Page
from gateway.net.hold import Hold
from gateway.net.legs import Leg
from gateway.net.opening import Opening
from gateway.net.promise import Promise
from gateway.net.tasks import Tasks
from gateway.net.upstream import Connection, ConnectionPool

HEARD = 0.25  # seconds for what an engine has written before it was told to stop
ANSWER_MOST = 1 << 20  # octets of the answer to a release leg, which is thrown away
PREFILL_MOST = 64 << 20  # octets of prefill's answer: with prompt_logprobs it is large


class Released(NamedTuple):
    """KV to be freed. `octets`: the request that does it, to the decode engine that was to fetch it; None for none."""

    octets: bytes | None
    refusable: bool  # whoever refuses it, having read it, has prefill let go
    backend: Backend | None
    connections: ConnectionPool | None
    holding: Holding
    tokens: int
    expires: float  # when the prefill engine frees it by itself
    seconds: float
    cap: int  # releases at once on one decode backend
    connector: str


class Detached(NamedTuple):
    """A decode leg whose client has left. `opening`: of its body, where its head has come."""

    answer: Promise[ResponseHead]
    opening: Hold | None
    connection: Connection
    lease: Lease
    holding: Holding | None  # what it is to fetch
    kv: Callable[[Holding], Released]  # the same, where it has not
    fetches: Callable[[int, bytes], bool]  # whether prefill holds it no more, by the status and how the body begins
    until: float | None  # it is cut then at the latest: decode must have fetched KV by then
    seconds: float
    dialect: Dialect
    prefill: Leg  # what is under way there still, and ends with it
    prefilling: asyncio.Task[Any] | None  # whose leg that is, where both are under way at once


class Ended(NamedTuple):
    """A prefill leg that has been ended, whose answer may have been on its way."""

    leg: Leg
    connection: Connection
    head: Promise[ResponseHead]
    page: Page | None  # of its body, where its head has come
    grace: float  # seconds that it may take to answer, before it is told to stop
    holds: Callable[[bytes], Released]  # what it holds, by its answer
    cut_off: Callable[[], None]  # its answer had begun, and did not end


class Releases:
    """`released`, `stranded`: told of how each ended, and of what is left behind (`paired.PairObserver`)."""

    def __init__(self, tasks: Tasks, released: Callable[[str], None], stranded: Callable[[str, int], None]):
        self._tasks, self._released, self._stranded = tasks, released, stranded
        self._running: Counter[str] = Counter()  # release legs, by the decode backend's name
        self.busy = 0  # all that is under way

    def release(self, work: Released) -> None:
        left = work.expires - time.monotonic()
        name = "" if work.backend is None else work.backend.name
        if work.octets is None or work.backend is None or work.connections is None or left <= 0:
            self.lost(work.holding, work.tokens, work.expires, work.connector)
        elif self._running[name] >= work.cap:
            self._released("capped")
            self.lost(work.holding, work.tokens, work.expires, work.connector)
        else:
            self._running[name] += 1
            self.busy += 1
            lease = work.backend.lease()
            self._tasks.start(self._release(work, lease, work.connections, work.octets, min(work.seconds, left)), "release leg")

    async def _release(self, work: Released, lease: Lease, connections: ConnectionPool, octets: bytes, seconds: float) -> None:
        result, connection = "failed", None
        try:
            async with asyncio.timeout(seconds):
                connection = await connections.open()  # a kept one may prove stale, and this is the last that is tried
                page = Page(connection, await connection.send(octets, b"POST"))
                answer, status = await page.whole(ANSWER_MOST), page.head.status
                done = 200 <= status < 300 or (work.refusable and turned_down(status, answer))
                result = "done" if done else "refused"
        except TimeoutError:
            result = "timeout"
        except Refusal as failure:  # no connection, or it broke
            forget(failure)
        finally:
            if connection is not None:
                connection.drop()
            self._running[lease.backend.name] -= 1
            self.busy -= 1
            self._released(result)
            if result == "done":
                work.holding.end()
            else:
                self.lost(work.holding, work.tokens, work.expires, work.connector)
            lease.release()

    def detach(self, work: Detached) -> None:
        self.busy += 1
        self._tasks.start(self._detach(work), "detached decode leg")

    async def _detach(self, work: Detached) -> None:
        now, result, again = time.monotonic(), "lost", False
        seconds = work.seconds if work.until is None else min(work.seconds, max(work.until - now, 0.0))
        try:
            async with asyncio.timeout(seconds):
                result = "detached" if work.fetches(*await _begun(work)) else "refused"
            again = result == "refused"
        except TimeoutError:
            result = "detached" if work.until is not None else "timeout"
        except Refusal as failure:  # it broke before it had begun
            again = True
            forget(failure)
        finally:
            work.connection.drop()
            self.busy -= 1
            self._released(result)
            if work.holding is not None and result == "detached":
                work.holding.end()
            elif work.holding is not None:
                kv = work.kv(work.holding)
                if again:
                    self.release(kv)
                else:
                    self.lost(kv.holding, kv.tokens, kv.expires, kv.connector)
            if work.prefilling is not None:  # before it has a connection, or while decode is to call back
                work.prefilling.cancel()
            work.prefill.end()
            work.lease.release()

    def hear(self, work: Ended) -> None:
        """Tell a prefill engine to stop, at once or after some grace, and hear whether it had answered by then."""
        if not work.grace and not work.connection.finish():
            work.leg.end()
            return
        self.busy += 1
        self._tasks.start(self._hear(work), "ended prefill leg")

    async def _hear(self, work: Ended) -> None:
        told = asyncio.get_running_loop().call_later(work.grace, work.connection.finish) if work.grace else None
        begun = False
        try:
            async with asyncio.timeout(work.grace + HEARD):
                head = await work.head
                if begun := head.status == 200:
                    page = work.page or Page(work.connection, head)
                    answer = await page.whole(PREFILL_MOST)
                    begun = False
                    self.release(work.holds(answer))
        except (TimeoutError, Refusal) as failure:
            forget(failure)
            if begun:
                work.cut_off()  # else it has stopped, as it was told
        finally:
            if told is not None:
                told.cancel()
            self.busy -= 1
            work.leg.end()

    def lost(self, holding: Holding, tokens: int, expires: float, connector: str) -> None:
        """It stays until the prefill engine's own time for it is over."""
        self._stranded(connector, tokens)
        left = expires - time.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, holding.end)
        else:
            holding.end()


async def _begun(work: Detached) -> tuple[int, bytes]:
    """Decode's status, and where it is well the first event of its stream, or an error that it begins with. Raises Refusal."""
    opening = work.opening
    head = await work.answer
    if opening is None:
        if not 200 <= head.status < 300:
            return head.status, b""
        opening = Opening(work.connection, head, work.dialect)
    error = await opening.done
    return head.status, error or (opening.data if isinstance(opening, Opening) else b"")
