"""net.deadline and net.promise: who is told what, whatever comes first."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import Refusal
from gateway.net.deadline import Deadline
from gateway.net.promise import Promise


async def within(seconds: float, future: asyncio.Future[str]) -> str:
    deadline = Deadline(seconds)
    try:
        return await future
    except asyncio.CancelledError:
        if not deadline.passed():
            raise
        return "late"
    finally:
        deadline.end()


async def test_in_time_and_late() -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(done.set_result, "in time")
    assert await within(60, done) == "in time"
    for seconds in (0.01, 0.0, -1.0):
        assert await within(seconds, loop.create_future()) == "late"
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_somebody_else_cancels() -> None:
    """Before it, or in the same step: that is theirs."""
    loop = asyncio.get_running_loop()
    for seconds in (60.0, 0.0):
        task = asyncio.create_task(within(seconds, loop.create_future()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()


async def test_something_else_comes_of_it() -> None:
    """A failure that the cancelled code ends in is that failure, and nobody is cancelled afterwards."""

    async def fails() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError from None
        return ""

    deadline = Deadline(0)
    with pytest.raises(ValueError):
        try:
            await fails()
        finally:
            deadline.end()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_promise_outlives_whoever_waits() -> None:
    promise: Promise[str] = Promise()

    async def waits() -> str:
        return await promise

    left = asyncio.create_task(waits())
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait((left,))
    assert left.cancelled() and not promise.done()
    other = asyncio.create_task(waits())
    await asyncio.sleep(0)
    promise.set_result("kept")
    assert await other == "kept" and await promise == "kept"


async def test_a_promise_is_kept_in_the_step_in_which_its_waiter_leaves() -> None:
    promise: Promise[None] = Promise()

    async def waits() -> None:
        await promise

    left = asyncio.create_task(waits())
    await asyncio.sleep(0)
    left.cancel()
    promise.set_result(None)
    await asyncio.wait((left,))
    assert left.cancelled() and promise.done()
    assert await promise is None


async def test_a_broken_promise() -> None:
    promise: Promise[str] = Promise()
    asyncio.get_running_loop().call_soon(promise.set_exception, Refusal("no_backend", "none"))
    for _ in range(2):
        with pytest.raises(Refusal, match="none"):
            await promise
