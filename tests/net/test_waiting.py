"""A place in the queue, where its turn and its deadline come in the same moment."""

from __future__ import annotations

import asyncio
import time
import types
from typing import Any

from gateway.core.admission import Admission
from gateway.core.backend import Backend
from gateway.core.models import Way
from gateway.core.pool import Pool
from gateway.core.priority import Classes
from gateway.net.waiting import Waiting
from gateway.net.watch import Timeouts

QUEUE = 0.05


async def test_a_second_try_whose_turn_comes_as_its_time_is_over_has_one_slot() -> None:
    first, second = Backend("a", "http://a"), Backend("b", "http://b", max_in_flight=1)
    way = Way(Pool([first, second]))
    admission = Admission(None, 8, time.monotonic)
    full = second.lease()

    class Fleet:
        def held_up(self, call: Any, tried: Any) -> bool:
            return second.full

        def pick(self, call: Any, tried: Any) -> Any:
            return way.backends.pick(time.monotonic(), tried)

    call: Any = types.SimpleNamespace(
        exchange=types.SimpleNamespace(queued=None, selected=None, accepted=time.monotonic(), phase=None),
        policy=types.SimpleNamespace(timeouts=Timeouts(queue=QUEUE), classes=Classes()), way=way, slot=None, lease=None,
    )  # fmt: skip
    head: Any = types.SimpleNamespace(fields=())
    assert admission.enter(way)
    call.slot = way.quotas
    waiting: Any = Waiting(Fleet(), admission)  # type: ignore[arg-type]
    waits = asyncio.create_task(waiting.once_more(call, head, [first]))
    await asyncio.sleep(0)
    assert admission.waiting == 1

    # in the same turn of the loop as the deadline, just after it: the one that was served leaves
    loop = asyncio.get_running_loop()
    loop.call_later(QUEUE + 0.01, lambda: (full.release(), admission.wake()))
    time.sleep(QUEUE + 0.02)
    assert await waits is True
    assert call.lease.backend is second
    assert admission.in_flight == 1
    call.lease.release()
    admission.release(call.slot)
    assert (admission.in_flight, admission.waiting, second.in_flight) == (0, 0, 0)
