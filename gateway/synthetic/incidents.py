"""Faults that happen: what each does to the answer that is under way.

They strike at a place of the answer, or at a moment of their own (`@ms:N`): then they are on the generation's timeline,
with the comments of `comment=SECONDS`. A fault that ends the answer raises `Ended`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from gateway.synthetic.damage import DAMAGE
from gateway.synthetic.dialect import Dialect
from gateway.synthetic.engine import Engine
from gateway.synthetic.faults import Place, Strike
from gateway.synthetic.framing import comment, frame
from gateway.synthetic.generation import EngineDied, Generation
from gateway.synthetic.outlet import Fields, Outlet, Raw
from gateway.synthetic.refusals import failed
from gateway.synthetic.sendlog import Entry
from gateway.synthetic.wire import json_response

BOOM: Final = "Internal server error"
_HEAD_EDITS: Final = ("ct", "ct_missing", "ce", "big_header", "many_cookies", "cl_short", "cl_long", "te_and_cl", "trailer")
# As long as a head, and none.
_GARBAGE: Final = b"\x15\x03\x01\x00\x02\x02\x46 this is no HTTP\r\n\r\n"


class Ended(Exception):
    """The answer is over. `response` is what goes to aiohttp."""

    def __init__(self, response: web.StreamResponse):
        super().__init__()
        self.response = response


class Incidents:
    """The faults of one answer. `raw` is its outlet where there is any fault; `streamed`: whether its body is events."""

    def __init__(
        self, engine: Engine, generation: Generation, shape: Dialect, raw: Raw | None, entry: Entry, *, streamed: bool
    ):
        self._engine, self._generation, self._shape, self._raw, self._entry = engine, generation, shape, raw, entry
        self._streamed = streamed
        plan = generation.plan
        self._left = [strike for strike in plan.strikes if strike.name not in DAMAGE and strike.name != "slow_read"]
        self._started = False  # whether anything of the answer is out
        self._comments: Outlet | None = None
        # Comments are not counted where the body's length was told.
        self._every = plan.behaviour.comment if streamed and plan.behaviour.framing != "length" else 0.0
        self._next_comment = math.inf
        self._due = generation.start

    # when -------------------------------------------------------------------------------------------------------------

    @property
    def next(self) -> float:
        """When something on the timeline is due."""
        moments = [self._moment(strike) for strike in self._left if strike.place is Place.MS]
        return min(self._next_comment, *moments) if moments else self._next_comment

    async def run(self) -> None:
        now = time.monotonic()
        for strike in [s for s in self._left if s.place is Place.MS and self._moment(s) <= now]:
            self._due = self._moment(strike)
            await self._strike(strike)
        if self._comments is not None and self._next_comment <= now:
            await self._comments.send(comment("keep-alive", self._generation.plan.behaviour), self._next_comment)
            self._next_comment += self._every

    async def at(self, place: Place, due: float, number: int = 0) -> None:
        """The answer has come to this place. Raises Ended."""
        if not self._left:
            return
        self._due = due
        for strike in [s for s in self._left if s.place is place and s.number <= number]:
            await self._strike(strike)

    def opened(self, outlet: Outlet, now: float) -> None:
        """The head is out: comments may come."""
        self._started = True
        if self._every:
            self._comments, self._next_comment = outlet, now + self._every

    def note(self, strike: Strike) -> None:
        """It has happened."""
        self._entry.faults.append(str(strike))
        self._engine.metrics.faults[strike.name].inc()

    def _moment(self, strike: Strike) -> float:
        return self._generation.start + strike.number / 1000

    async def _strike(self, strike: Strike) -> None:
        self._left.remove(strike)
        self.note(strike)
        await _ACTS[strike.name](self, strike)

    @property
    def _outlet(self) -> Raw:
        if self._raw is None:
            raise RuntimeError("an answer with faults has no raw outlet")
        return self._raw

    # endings ----------------------------------------------------------------------------------------------------------

    async def _down(self, strike: Strike) -> None:
        assert isinstance(strike.argument, float)
        self._engine.close_port(strike.argument)
        await self._reset(strike)

    async def _hang(self, strike: Strike) -> None:
        await self._outlet.flush()
        await asyncio.get_running_loop().create_future()

    async def _reset(self, strike: Strike) -> None:
        raise Ended(await self._outlet.reset())

    async def _close(self, strike: Strike) -> None:
        raise Ended(await self._outlet.close())

    async def _eof_clean(self, strike: Strike) -> None:
        await self._whole_only(strike)
        raise Ended(await self._outlet.end())

    async def _eof_trunc(self, strike: Strike) -> None:
        await self._whole_only(strike)
        await self._outlet.flush()
        await self._outlet.write(b'ff\r\ndata: {"id":"chatcmpl-')
        raise Ended(await self._outlet.close())

    async def _bad_chunk(self, strike: Strike) -> None:
        await self._whole_only(strike)
        await self._outlet.flush()
        await self._outlet.write(b"xyz\r\n")
        raise Ended(await self._outlet.close())

    async def _error(self, strike: Strike) -> None:
        assert isinstance(strike.argument, int)
        if not self._streamed:
            raise failed(strike.argument, BOOM)
        for event in self._shape.failure(strike.argument, BOOM):
            await self._outlet.send(frame(event), self._due)
            if strike.name == "error_cut":
                break
        raise Ended(await self._outlet.end())

    async def _abort(self, strike: Strike) -> None:
        if self._generation.finish is not None:
            return  # it ended by itself with that very token
        step = self._generation.abort() if strike.name == "abort" else self._generation.recomputed()
        if not self._streamed:
            return
        for event in (*self._shape.step(step), *self._shape.closing()):
            await self._outlet.send(frame(event), self._due)
        raise Ended(await self._outlet.end())

    async def _half_event(self, strike: Strike) -> None:
        await self._whole_only(strike)
        await self._outlet.send(b'data: {"id":"chatcmpl-', self._due)
        raise Ended(await self._outlet.end())

    async def _half_done(self, strike: Strike) -> None:
        await self._whole_only(strike)
        await self._outlet.send(b"data: [DO", self._due)
        raise Ended(await self._outlet.end())

    async def _engine_death(self, strike: Strike) -> None:
        self._engine.die()
        raise EngineDied

    async def _whole_only(self, strike: Strike) -> None:
        """What breaks off a stream of chunks can only break off the connection of any other answer."""
        if not self._streamed:
            await self._close(strike)

    # delays -----------------------------------------------------------------------------------------------------------

    async def _stall(self, strike: Strike) -> None:
        assert isinstance(strike.argument, int)
        await self._outlet.flush()
        self._generation.delay(strike.argument / 1000)
        await asyncio.sleep(strike.argument / 1000)

    async def _trickle(self, strike: Strike) -> None:
        assert isinstance(strike.argument, int)
        self._outlet.slow_down(strike.argument)

    async def _cpu(self, strike: Strike) -> None:
        assert isinstance(strike.argument, int)
        time.sleep(strike.argument / 1000)  # noqa: ASYNC251 - holding everybody up is what was asked for

    # heads and tails --------------------------------------------------------------------------------------------------

    async def _status(self, strike: Strike) -> None:
        assert isinstance(strike.argument, int)
        behaviour, status = self._generation.plan.behaviour, strike.argument
        fields = {"retry-after": str(behaviour.retry_after)} if status in (429, 503) else {}
        if behaviour.error_body == "json":
            raise failed(status, _SAID.get(status, BOOM), fields)
        body = f"<html><body><h1>{status}</h1></body></html>\n" if behaviour.error_body == "html" else ""
        response = json_response(body, status, fields)
        if behaviour.error_body == "html":
            response.headers["content-type"] = "text/html; charset=utf-8"
        raise Ended(response)

    async def _early_hints(self, strike: Strike) -> None:
        await self._outlet.write(b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n")

    async def _head_garbage(self, strike: Strike) -> None:
        await self._outlet.write(_GARBAGE)
        raise Ended(await self._outlet.close())

    async def _http09(self, strike: Strike) -> None:
        self._outlet.headless = True
        self._outlet.unframed()

    async def _edit(self, strike: Strike) -> None:
        before, outlet = self._outlet.edit, self._outlet
        outlet.edit = lambda fields: edited(before(fields), strike)
        if strike.name == "trailer":
            outlet.trailer = b"x-trailer: 1\r\n"
        elif strike.name == "cl_long":
            outlet.keep = False

    async def _extra(self, strike: Strike) -> None:
        assert isinstance(strike.argument, int)
        await self._outlet.write((b"HTTP/1.1 200 OK\r\n" * (strike.argument // 17 + 1))[: strike.argument])


_ACTS: Final[dict[str, Callable[[Incidents, Strike], Awaitable[None]]]] = {
    "refuse": Incidents._reset,
    "down": Incidents._down,
    "hang": Incidents._hang,
    "reset": Incidents._reset,
    "close": Incidents._close,
    "eof_clean": Incidents._eof_clean,
    "eof_trunc": Incidents._eof_trunc,
    "bad_chunk": Incidents._bad_chunk,
    "error_event": Incidents._error,
    "error_cut": Incidents._error,
    "abort": Incidents._abort,
    "recomputed": Incidents._abort,
    "half_event": Incidents._half_event,
    "half_done": Incidents._half_done,
    "engine_death": Incidents._engine_death,
    "stall": Incidents._stall,
    "trickle": Incidents._trickle,
    "cpu": Incidents._cpu,
    "status": Incidents._status,
    "early_hints": Incidents._early_hints,
    "head_garbage": Incidents._head_garbage,
    "http09": Incidents._http09,
    "extra": Incidents._extra,
    "keepalive_close": Incidents._close,
    **dict.fromkeys(_HEAD_EDITS, Incidents._edit),
}

_SAID: Final = {
    429: "Too many requests",
    503: "The engine is overloaded",
    404: "The model does not exist",
    400: "The request is bad",
    401: "Unauthorized",
}


def edited(fields: Fields, strike: Strike) -> Fields:
    """The fields of a head as a fault has them. A Content-Length that lies takes the place of the framing there was."""
    argument = strike.argument
    rest = [(name, value) for name, value in fields if name != "content-type"]
    if strike.name == "ct":
        return [("content-type", str(argument)), *rest]
    if strike.name == "ct_missing":
        return rest
    if strike.name == "ce":
        return [*fields, ("content-encoding", str(argument))]
    if strike.name == "big_header" and isinstance(argument, int):
        return [*fields, ("x-big", "x" * argument)]
    if strike.name == "many_cookies" and isinstance(argument, int):
        return [*fields, *(("set-cookie", f"c{number}={number}; Path=/") for number in range(argument))]
    if strike.name == "te_and_cl":
        return [*fields, ("content-length", "5")]
    if strike.name == "trailer":
        return [*fields, ("trailer", "x-trailer")]
    length = next((int(value) for name, value in fields if name == "content-length"), 0)
    lie = length - 1 if strike.name == "cl_short" else length + 1000
    kept = [(name, value) for name, value in fields if name not in ("content-length", "transfer-encoding", "connection")]
    return [*kept, ("content-length", str(lie))]
