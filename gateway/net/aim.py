"""Where a request goes by its model: the way that it takes, and, for an alias, those that are left and its body's one value."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from gateway.core.admission import exchanged
from gateway.core.inspection import Edit, members, splice
from gateway.core.models import Alias, Models, Way
from gateway.net.call import Call, Upload


class Aim:
    """What an alias' request may still be sent to. Its body is rewritten, in this one value, for each that it is sent to."""

    __slots__ = ("_begin", "_end", "_left", "_upload")

    def __init__(self, upload: Upload, ways: list[Way]):
        self._upload, self._left = upload, ways
        if upload.place is not None:
            self._begin, self._end = upload.place
            return
        found = upload.members.found if upload.members is not None else members(upload.held)
        # of a name that is there twice, the last one holds for every parser that engines use
        last = [member for member in found if member.key == "model"][-1]
        self._begin, self._end = last.value_begin, last.end

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
        upload, model = self._upload, way.rewritten or way.model or ""
        name = msgspec.json.encode(model) if upload.place is None else model.encode()
        upload.held = splice(upload.held, [Edit(self._begin, self._end, name)])
        if upload.length is not None:
            upload.length += len(name) - (self._end - self._begin)
        self._end = self._begin + len(name)
        return True


def aim(call: Call, models: Models, upload: Upload, chance: float) -> None:
    """Find the call's way. `chance`: a random number from 0 to 1. Raises Refusal where nobody knows its model."""
    found = models.find(call.exchange.model)
    if type(found) is Alias:
        call.aim = Aim(upload, found.order(chance, time.monotonic()))
        call.aim.go_on(call)
    else:
        assert isinstance(found, Way)
        call.way = found
