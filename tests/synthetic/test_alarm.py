"""Waking at a moment, on both kinds of loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from gateway.synthetic.alarm import Alarm


async def ring(moments: list[float], cancelled: tuple[int, ...] = ()) -> list[tuple[int, float]]:
    """Which alarms rang, in order, and how late each was."""
    alarm, rung, start = Alarm(), [], time.monotonic()
    done = asyncio.Event()

    def note(at: int) -> Callable[[], None]:
        def call() -> None:
            rung.append((at, time.monotonic() - start - moments[at]))
            if len(rung) == len(moments) - len(cancelled):
                done.set()

        return call

    wakes = [alarm.at(start + moment, note(at)) for at, moment in enumerate(moments)]
    for at in cancelled:
        wakes[at].cancel()
    async with asyncio.timeout(5):
        await done.wait()
    await asyncio.sleep(0.02)
    alarm.close()
    alarm.close()
    return rung


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_never_early_and_in_order(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    moments = [0.03, 0.0101, 0.0102, 0.02, -1.0, 0.0]
    with asyncio.Runner(loop_factory=factory) as runner:
        rung = runner.run(ring(moments, cancelled=(3,)))
    assert [at for at, _ in rung] == [4, 5, 1, 2, 0]
    assert all(late >= 0 for _, late in rung)


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_earlier_moment_comes_first_though_it_was_asked_for_later(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> list[str]:
        alarm, rung = Alarm(), []
        now = time.monotonic()
        alarm.at(now + 0.05, lambda: rung.append("late"))
        await asyncio.sleep(0.005)
        alarm.at(now + 0.02, lambda: rung.append("early"))
        async with asyncio.timeout(5):
            while len(rung) < 2:
                await asyncio.sleep(0.001)
        alarm.close()
        return rung

    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(scenario()) == ["early", "late"]


async def test_who_asks_again_from_within_his_call_has_another_round() -> None:
    alarm, rung = Alarm(), 0

    def again() -> None:
        nonlocal rung
        rung += 1
        alarm.at(0.001, again)

    alarm.at(0.001, again)
    alarm.ring()
    assert rung == 1
    async with asyncio.timeout(5):
        while rung < 5:
            await asyncio.sleep(0)
    alarm.close()


async def test_a_call_that_fails_keeps_nobody_else_from_being_called() -> None:
    alarm, told, rung = Alarm(), [], asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    alarm.at(0.001, lambda: [].pop())
    alarm.at(0.001, rung.set)
    async with asyncio.timeout(5):
        await rung.wait()
    assert [type(error) for error in told] == [IndexError]
    alarm.close()


async def test_in_the_midst_of_long_work_those_whose_moment_came_are_called() -> None:
    alarm, rung = Alarm(), []
    now = time.monotonic()
    alarm.at(now + 0.005, lambda: rung.append("due"))
    alarm.at(now + 60, lambda: rung.append("not due"))
    alarm.catch_up()
    assert not rung or time.monotonic() >= now + 0.005
    time.sleep(0.01)  # the loop does not come round
    alarm.catch_up()
    assert rung == ["due"]
    alarm.close()
