"""One answer on its way: the generation's steps, in the shape of an API, through the faults, out to the client.

The places of `faults.Place` are passed here, in both forms: a stream of events, and one JSON object when all is said. Of
the latter nothing is out before its last token: what strikes at a token strikes an answer that has not begun.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from aiohttp import web
from aiohttp.http import HttpVersion11

from gateway.synthetic.ask import Ask
from gateway.synthetic.damage import Damage
from gateway.synthetic.dialect import Dialect
from gateway.synthetic.engine import Engine
from gateway.synthetic.faults import Place
from gateway.synthetic.framing import frame, framer
from gateway.synthetic.generation import EngineDied, EngineFault, Generation
from gateway.synthetic.incidents import Ended, Incidents
from gateway.synthetic.outlet import Fields, Ordinary, Outlet, Raw
from gateway.synthetic.refusals import VllmRefusal, failed
from gateway.synthetic.responses import Responses
from gateway.synthetic.sendlog import RUNNING, Entry
from gateway.synthetic.voice import Spoken
from gateway.synthetic.wire import Event, Mark, json_response

_LYING: Final = ("cl_short", "cl_long")


class Answer:
    """`fields`: of the head, besides vLLM's own. `dialect` and `request_id` make the shape, and a second one to measure."""

    def __init__(
        self,
        request: web.Request,
        engine: Engine,
        ask: Ask,
        generation: Generation,
        dialect: type[Dialect],
        entry: Entry,
        fields: Fields,
    ):
        self._request, self._engine, self._ask = request, engine, ask
        self._generation, self._dialect, self._entry, self._fields = generation, dialect, entry, fields
        self._plan = generation.plan
        self._request_id = request.headers.get("X-Request-Id")
        self._shape = dialect(ask, generation, self._request_id)

    async def give(self) -> web.StreamResponse:
        """Raises VllmRefusal where it comes to that before the head."""
        try:
            response = await (self._stream() if self._ask.stream else self._whole())
            if self._entry.ended == RUNNING:
                self._entry.ended = "complete"
        except EngineFault as fault:
            self._entry.ended = "error"
            self._engine.metrics.success["error"].inc(self._ask.choices)
            raise failed(500, fault.message) from None
        except Ended as ended:
            self._entry.ended = "fault"
            return ended.response
        except VllmRefusal as refusal:
            self._entry.ended = f"status {refusal.status}"
            raise
        except BaseException:
            self._entry.ended = "left"
            raise
        return response

    # a stream ---------------------------------------------------------------------------------------------------------

    async def _stream(self) -> web.StreamResponse:
        plan, generation = self._plan, self._generation
        outlet, raw = self._outlet()
        incidents = Incidents(self._engine, generation, self._shape, raw, self._entry, streamed=True)
        framed = framer(plan.behaviour)
        course = _Course(outlet, incidents, Damage(plan.strikes, framed), final_blank=plan.behaviour.final_blank)
        voice = None
        if isinstance(outlet, Ordinary) and not plan.behaviour.comment:
            voice = Spoken(outlet, self._shape, framed, even=generation.even)
        due = generation.start + plan.behaviour.head
        await incidents.at(Place.HEAD, due)
        await generation.rest(due)
        await outlet.open(self._fields, due)
        incidents.opened(outlet, time.monotonic())
        try:
            await self._events(course, due, incidents, voice)
        except EngineFault as fault:
            return await self._fail(fault, outlet)
        response = await outlet.end()
        await incidents.at(Place.END, time.monotonic())
        return response

    async def _events(self, course: _Course, due: float, incidents: Incidents, voice: Spoken | None) -> None:
        generation = self._generation
        await course.send(self._shape.opening(), due, 0)
        await incidents.at(Place.TOKEN, due)
        # Of a burst, hundreds are set up in one round of the loop: whose moment comes meanwhile is served in between.
        assert self._engine.alarm is not None
        self._engine.alarm.catch_up()
        async for step in generation.steps(incidents, voice):
            due = step.due
            await course.send(self._shape.step(step), due, step.number)
            await incidents.at(Place.TOKEN, due, step.number)
        if voice is None or not voice.over:
            await course.send(self._shape.closing(), due, generation.tokens)

    async def _fail(self, fault: EngineFault, outlet: Outlet) -> web.StreamResponse:
        self._entry.ended = "error"
        self._engine.metrics.success["error"].inc(self._ask.choices)
        if self._dialect is Responses and isinstance(fault, EngineDied):
            # vLLM breaks these off. The client's connection goes with the answer.
            raise ConnectionResetError("the engine died")
        for event in self._shape.failure(500, fault.message):
            await outlet.send(frame(event), time.monotonic())
        return await outlet.end()

    def _outlet(self) -> tuple[Outlet, Raw | None]:
        behaviour, strikes = self._plan.behaviour, self._plan.strikes
        if behaviour.plain and behaviour.final_blank and not strikes and self._request.version >= HttpVersion11:
            return Ordinary(self._request, self._entry), None
        measured = behaviour.framing == "length" or any(strike.name in _LYING for strike in strikes)
        raw = Raw(self._request, behaviour, self._entry, self._measure() if measured else None)
        return raw, raw

    def _measure(self) -> int:
        """How many bytes the body will have: the whole answer, once over without its time."""
        twin = Generation(self._engine, self._ask, self._plan)
        shape = self._dialect(self._ask, twin, self._request_id)
        damage = Damage(self._plan.strikes, framer(self._plan.behaviour))
        events: list[tuple[Event, int]] = [(event, 0) for event in shape.opening()]
        for step in twin.peek():
            events += [(event, step.number) for event in shape.step(step)]
        events += [(event, twin.tokens) for event in shape.closing()]
        pieces = [piece for event, number in events for piece in damage.bytes_of(event, number)]
        if not self._plan.behaviour.final_blank:
            pieces[-1] = _unfinished(pieces[-1])
        return sum(map(len, pieces))

    # one object -------------------------------------------------------------------------------------------------------

    async def _whole(self) -> web.StreamResponse:
        plan, generation, behaviour = self._plan, self._generation, self._plan.behaviour
        raw = Raw(self._request, behaviour, self._entry, 0) if plan.strikes or not behaviour.plain else None
        incidents = Incidents(self._engine, generation, self._shape, raw, self._entry, streamed=False)
        await incidents.at(Place.HEAD, generation.start)
        await incidents.at(Place.ROLE, generation.start)
        await incidents.at(Place.TOKEN, generation.start)
        due = generation.start
        async for step in generation.steps(incidents):
            due = step.due
            await incidents.at(Place.TOKEN, due, step.number)
        await generation.rest(generation.start + behaviour.head)
        if raw is None:
            self._entry.add(due, time.monotonic(), 0)
            return json_response(self._shape.whole(), headers=dict(self._fields))
        body = self._shape.whole().encode("utf-8", "replace")
        raw.frame_by(None if behaviour.framing == "close" else len(body))
        await raw.head(200, [("content-type", "application/json"), *self._fields], due)
        half = len(body) // 2
        await raw.send(body[:half], due)
        await incidents.at(Place.DONE, due)
        await raw.send(body[half:], due)
        response = await raw.end()
        await incidents.at(Place.END, time.monotonic())
        return response


class _Course:
    """The events of a stream, and the places between them."""

    def __init__(self, outlet: Outlet, incidents: Incidents, damage: Damage, *, final_blank: bool):
        self._outlet, self._incidents, self._damage = outlet, incidents, damage
        self._spoke = False
        self._noted = 0
        self._final_blank = final_blank

    async def send(self, events: Iterable[Event], due: float, token: int) -> None:
        outlet, incidents, damage = self._outlet, self._incidents, self._damage
        for event in events:
            if not self._spoke and event.mark is not Mark.OPENING:
                self._spoke = True
                await incidents.at(Place.ROLE, due)
            elif event.mark is Mark.LAST:
                await incidents.at(Place.DONE, due)
            for piece in damage.bytes_of(event, token):
                last = event.mark is Mark.LAST and not self._final_blank
                await outlet.send(_unfinished(piece) if last else piece, due)
            if len(damage.struck) > self._noted:
                self._note()

    def _note(self) -> None:
        for strike in self._damage.struck[self._noted :]:
            self._incidents.note(strike)
        self._noted = len(self._damage.struck)


def _unfinished(piece: bytes) -> bytes:
    """Without the blank line that ends an event: half of its line ends."""
    content = piece.rstrip(b"\r\n")
    ends = piece[len(content) :]
    return content + ends[: len(ends) // 2]
