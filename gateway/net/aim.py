"""Where a request goes by its model: the way that it takes; for an alias, those that are left, and the value that names it."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.core import query
from gateway.core.admission import exchanged
from gateway.core.inspection import Edit, members, splice
from gateway.core.jsonbody import Member
from gateway.core.models import Alias, Models, Way
from gateway.net.call import Call, Upload

# A WebSocket, which has no body: its query names the model, as in OpenAI's API
REALTIME: Final = b"/v1/realtime"


class Aim(abc.ABC):
    """What an alias' request may still be sent to. It is rewritten, in the value that names the model, for each of these."""

    __slots__ = ("_left",)

    def __init__(self, ways: list[Way]):
        self._left = ways

    @property
    def left(self) -> Sequence[Way]:
        return self._left

    def go_on(self, call: Call) -> bool:
        """To the next one, if there is one."""
        if not self._left:
            return False
        way = self._left.pop(0)
        if call.slot is not None:
            call.slot = exchanged(call.slot, way)
        call.way = way
        self._names(call, way.rewritten or way.model or "")
        return True

    @abc.abstractmethod
    def _names(self, call: Call, model: str) -> None:
        """Its request asks for this model now."""


class BodyAim(Aim):
    """A body, JSON or form, names the model."""

    __slots__ = ("_begin", "_end", "_of", "_upload")

    def __init__(self, ways: list[Way], upload: Upload):
        super().__init__(ways)
        self._upload = upload
        if upload.place is not None:
            self._begin, self._end = upload.place
            self._of = upload.held
        else:
            self._find(upload.members.found if upload.members is not None else members(upload.held))

    def _find(self, found: list[Member]) -> None:
        # of a name that is there twice, the last one holds for every parser that engines use
        last = [member for member in found if member.key == "model"][-1]
        self._begin, self._end, self._of = last.value_begin, last.end, self._upload.held

    def _names(self, call: Call, model: str) -> None:
        upload = self._upload
        if upload.held is not self._of:  # what is not the client's to say has been taken out meanwhile (`net.disagg`)
            self._find(members(upload.held))
        name = msgspec.json.encode(model) if upload.place is None else model.encode()
        upload.held = splice(upload.held, [Edit(self._begin, self._end, name)])
        if upload.length is not None:
            upload.length += len(name) - (self._end - self._begin)
        self._end, self._of = self._begin + len(name), upload.held


class QueryAim(Aim):
    """The request target's query does."""

    __slots__ = ("_place", "_target")

    def __init__(self, ways: list[Way], target: bytes, place: tuple[int, int]):
        super().__init__(ways)
        self._target, self._place = target, place

    def _names(self, call: Call, model: str) -> None:
        call.target = splice(self._target, [Edit(*self._place, query.coded(model))])


def aim(call: Call, models: Models, upload: Upload, chance: float) -> None:
    """Find the call's way. `chance`: a random number from 0 to 1. Raises Refusal where nobody knows its model."""
    exchange, route, place = call.exchange, call.route, None
    assert route is not None
    if exchange.model is None and route.path == REALTIME and (place := query.place_of(route.target, b"model")) is not None:
        exchange.model = query.decoded(route.target[slice(*place)]).decode("utf-8", "replace")
    found = models.find(exchange.model)
    if type(found) is Alias:
        ways = found.order(chance, time.monotonic())
        call.aim = BodyAim(ways, upload) if place is None else QueryAim(ways, route.target, place)
        call.aim.go_on(call)
    else:
        assert isinstance(found, Way)
        call.way = found
