"""Whose encode, prefill or decode backends are all at their max_in_flight waits for them, in a line of its model's own.

Which requests need which of them is known only once their body has been looked at: by then a request has had its turn in the
common queue. So it gives its slot back, and waits again, among those that need the same; whoever is served by one backend
alone, or has nothing for encoders, is not held up by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from gateway.core.admission import Admission, Line
from gateway.core.backend import Backend
from gateway.core.head import RequestHead
from gateway.net.call import Call
from gateway.net.fleet import Fleet
from gateway.net.waiting import Waiting

Tried = Mapping[str, Sequence[Backend]]  # by role: those that a request needs, with whom it has been in vain
_Need = tuple[str | None, tuple[str, ...]]  # a model, and roles


class _Room:
    """Where a line leads to: a backend of each role (`core.admission.Room`)."""

    in_flight = None

    def __init__(self, fleet: Fleet, need: _Need):
        self._fleet, (self._name, self._roles) = fleet, need

    def has_room(self, clock: Callable[[], float]) -> bool:
        """Or nobody can be reached: then waiting is in vain."""
        return all(self._fleet.of_model(role, self._name).has_room(clock) for role in self._roles)


class _Others:
    """Where a second try's line leads to: backends that have not been tried, of each role; but decode's (`Pairs.begin`)."""

    in_flight = None

    def __init__(self, fleet: Fleet, call: Call, tried: Tried):
        self._fleet, self._call, self._tried = fleet, call, tried

    def has_room(self, clock: Callable[[], float]) -> bool:
        now = clock()
        return not any(self._is_full(role, now) for role in self._tried)

    def _is_full(self, role: str, now: float) -> bool:
        pool, tried = self._fleet.of(role, self._call), self._tried[role]
        again = role == "decode" and not pool.others(tried, now)
        return pool.held_up(() if again else tried, now)


class Turns:
    def __init__(self, fleet: Fleet, admission: Admission, waiting: Waiting):
        self._fleet, self._admission, self._waiting = fleet, admission, waiting
        self._lines: dict[_Need, Line] = {}  # of those for which somebody has had to wait

    def waits(self, call: Call, tried: Tried) -> bool:
        """Whether a request has to stand in line: there is one already, or somebody whom it needs has no room."""
        fleet, name = self._fleet, self._fleet.model_of(call)
        if self._lines:
            line = self._lines.get((name, tuple(tried)))
            if line is not None and line.waiting:
                return True
        return any(not fleet.of_model(role, name).has_room(time.monotonic) for role in tried)

    async def wait(self, call: Call, head: RequestHead, tried: Tried, take: Callable[[], None]) -> None:
        """Stand in line. `take` is called in the step in which its turn comes. Raises Refusal."""
        fleet = self._fleet
        need = name, _ = fleet.model_of(call), tuple(tried)
        line = self._lines.get(need)
        if line is None:
            self._lines = {known: other for known, other in self._lines.items() if other.waiting}
            line = self._lines[need] = Line(_Room(fleet, need), name)
        way, slot = call.way, call.slot
        assert way is not None and slot is not None
        line.quotas = way.quotas
        call.slot = None
        self._admission.release(slot)
        await self._waiting.stand(call, head, line, way.rank, take)

    def is_full(self, call: Call, tried: Tried) -> bool:
        """Whether a second try has to wait."""
        return not _Others(self._fleet, call, tried).has_room(time.monotonic)

    async def once_more(self, call: Call, head: RequestHead, tried: Tried, take: Callable[[], None]) -> None:
        """Wait for those that have not been tried. `take` is not called where that was in vain."""
        way = call.way
        assert way is not None
        await self._waiting.again(call, head, Line(_Others(self._fleet, call, tried), way.model, way.quotas, way.rank), take)
