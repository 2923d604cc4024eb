"""The one timer behind all deadlines."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import types
from typing import Any

import pytest

from gateway.core.outcome import Outcome, Phase
from gateway.net.watch import NEVER, Timeouts, Watch


class _Call:
    """As much of a call as a watch looks at: its request is sent, and no head has come."""

    relay = None
    look_at = NEVER
    waiting = True
    others = ()

    def __init__(self, sent: float):
        self.exchange = types.SimpleNamespace(request_id="r", accepted=sent, sent=sent, phase=Phase.WAIT)
        self.policy = types.SimpleNamespace(timeouts=Timeouts(first_byte=0.05), step=0.05, comment=None)


async def test_a_fault_in_one_exchange_takes_no_deadline_from_others(caplog: pytest.LogCaptureFixture) -> None:
    now = asyncio.get_running_loop().time()
    faulty, sound = _Call(now), _Call(now)
    del faulty.exchange.sent
    live: dict[int, Any] = {1: faulty, 2: sound}
    expired = asyncio.Event()

    def told(call: Any, outcome: Outcome) -> None:
        assert (call, outcome) == (sound, Outcome.TIMEOUT_FIRST_BYTE)
        del live[2]
        expired.set()

    watch = Watch(live, told)
    with caplog.at_level(logging.ERROR):
        watch.begin(live[1], now)
        watch.begin(live[2], now)
        await asyncio.wait_for(expired.wait(), 5)
    assert "could not be looked at" in caplog.text
    live.clear()
    await asyncio.sleep(0.05)  # the timer looks once more, and stops


@pytest.mark.parametrize("step", [0.05, 0.2, 0.39, 1.1])  # of some a tenth ten times is more than the whole
async def test_others_that_begin_put_no_deadline_off(step: float) -> None:
    now = asyncio.get_running_loop().time()
    first = _Call(now)
    first.policy.step = step
    live: dict[int, Any] = {1: first}
    expired = asyncio.Event()

    def told(call: Any, outcome: Outcome) -> None:
        live.clear()
        expired.set()

    watch = Watch(live, told)
    watch.begin(live[1], now)
    async with asyncio.timeout(10):
        while not expired.is_set():  # more often than it looks
            other = _Call(asyncio.get_running_loop().time())
            other.policy.step = step
            watch.begin(other, other.exchange.sent)  # type: ignore[arg-type]
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.15)


async def test_this_process_was_held_up() -> None:
    """What came while it did not run is read before deadlines are judged: whoever has answered is not told to be late."""
    loop = asyncio.get_running_loop()
    call, other = _Call(loop.time()), _Call(loop.time())
    live: dict[int, Any] = {1: call, 2: other}
    expired: list[Any] = []
    over = asyncio.Event()

    def told(late: Any, outcome: Outcome) -> None:
        expired.append(late)
        live.clear()
        over.set()

    watch = Watch(live, told)
    for each in live.values():
        watch.begin(each, loop.time())
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def answered(turns: int) -> None:  # as many turns of the loop as an answer takes
            loop.remove_reader(ours)
            if turns:
                loop.call_soon(answered, turns - 1)
            else:
                call.waiting = None  # type: ignore[assignment]

        loop.add_reader(ours, answered, 4)
        time.sleep(0.3)
        await asyncio.sleep(0.01)  # and again, while they are put off
        theirs.send(b".")
        time.sleep(0.3)
        await asyncio.wait_for(over.wait(), 5)
    assert expired == [other]
    await asyncio.sleep(0.05)
