"""net.deadline and net.promise: who is told what, whatever comes first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.errors import Refusal
from gateway.net.deadline import Deadline, within
from gateway.net.promise import Promise


async def ended(seconds: float, future: asyncio.Future[str]) -> str:
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
    assert await ended(60, done) == "in time"
    for seconds in (0.01, 0.0, -1.0):
        assert await ended(seconds, loop.create_future()) == "late"
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_somebody_else_cancels() -> None:
    """Before it, or in the same step: that is theirs."""
    loop = asyncio.get_running_loop()
    for seconds in (60.0, 0.0):
        task = asyncio.create_task(ended(seconds, loop.create_future()))
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


@contextlib.asynccontextmanager
async def answered_meanwhile(seconds: float) -> AsyncIterator[asyncio.Future[str]]:
    """An answer that lies in a socket all the time in which this process does not run; to take it in takes some turns."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    ours, theirs = socket.socketpair()

    def soon(turns: int) -> None:
        if turns:
            loop.call_soon(soon, turns - 1)
        elif not answer.done():
            answer.set_result("in time")

    with ours, theirs:
        loop.add_reader(ours, lambda: (loop.remove_reader(ours), soon(4)))
        loop.call_soon(held_up, seconds, lambda: theirs.send(b"."))
        yield answer
        loop.remove_reader(ours)


def held_up(seconds: float, meanwhile: Callable[[], object]) -> None:
    meanwhile()
    time.sleep(seconds)


async def test_this_process_was_held_up() -> None:
    """That is nobody else's fault: what has come meanwhile is looked at first."""
    async with answered_meanwhile(0.5) as answer:
        assert await ended(0.1, answer) == "in time"
    async with answered_meanwhile(0.5) as answer:
        with within(0.1):
            assert await answer == "in time"


async def test_it_is_held_up_all_the_time() -> None:
    """Then deadlines are put off again, but pass in the end."""
    loop = asyncio.get_running_loop()

    def busy() -> None:
        time.sleep(0.25)
        if not ended_.done():
            loop.call_soon(busy)

    loop.call_soon(busy)
    ended_ = asyncio.create_task(ended(0.05, loop.create_future()))
    assert await ended_ == "late"


async def test_a_timeout() -> None:
    """`within` is to `asyncio.timeout` what its name says: whoever else cancels is not taken for it."""
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError), within(0.01):
        await loop.create_future()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()

    async def waits() -> None:
        with within(60):
            await loop.create_future()

    other = asyncio.create_task(waits())
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.wait((other,))
    assert other.cancelled()
