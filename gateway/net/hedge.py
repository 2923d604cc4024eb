"""A second attempt on another backend while the first one has not said anything, where a model opts in.

Whoever says something first is committed, and the other one's connection is closed at once, which makes its engine stop. At
most one hedge an exchange, on another backend, and only where that has room now: never so that anybody waits for it, and
within the budget of second attempts, so that a fleet which is slow all over is not asked twice as much. The two attempts are
two tasks, which end with this function, however it ends.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from gateway.core.backend import Backend
from gateway.core.head import ResponseHead
from gateway.core.hedging import Failure, better, wins
from gateway.core.outcome import Outcome
from gateway.errors import EngineRefused, Refusal, UpstreamFailed
from gateway.net.call import Call
from gateway.net.legs import Leg, beside

if TYPE_CHECKING:
    from gateway.net.attempts import Attempts

Attempt = Callable[[Leg], Coroutine[Any, Any, ResponseHead]]
Said = ResponseHead | Refusal | EngineRefused


async def race(attempts: Attempts, call: Call, attempt: Attempt, after: float, tried: Sequence[Backend]) -> ResponseHead:
    """The response of whoever is first; the call is then the leg that it came on. `tried`: who has failed before.

    Raises UpstreamFailed, EngineRefused, Refusal. Where there was no hedge, that is as of a single attempt. Where there was one
    (`call.hedged`), both have failed, and are judged and over.
    """
    running: dict[asyncio.Task[Said], Leg] = {_start(attempts, attempt, call): call}
    hedge: Leg | None = None
    try:
        await asyncio.wait(running, timeout=after)
        if not next(iter(running)).done():
            hedge = _second(attempts, call, tried)
        if hedge is None:
            (task,) = running
            return _response(await task)
        running[_start(attempts, attempt, hedge)] = hedge
        winner, response = await _first(attempts, call, running)
        if call.lease is not None and call in running.values():  # it has not said anything yet
            call.lease.backend.penalty.failed(time.monotonic())  # for its lateness: it is asked a little less for some seconds
        attempts.observer.hedged(call.exchange, "won" if winner is hedge else "lost")
        if winner is hedge:
            _take_over(call, hedge)
        return response
    finally:
        call.others = ()
        for task in running:
            task.cancel()
        if hedge is not None:
            hedge.end()
            attempts.admission.wake()


def _start(attempts: Attempts, attempt: Attempt, leg: Leg) -> asyncio.Task[Said]:
    return attempts.tasks.spawn(said(attempt(leg)), "a hedged attempt")


async def said(attempt: Coroutine[Any, Any, ResponseHead]) -> Said:
    """What came of an attempt: a failure is none of the task's."""
    try:
        return await attempt
    except (Refusal, EngineRefused) as failure:
        return failure


def _second(attempts: Attempts, call: Call, tried: Sequence[Backend]) -> Leg | None:
    """A leg on another backend, if it may be had."""
    assert call.lease is not None
    leg = beside(call.exchange)
    if attempts.admission.waiting or not attempts.retries.solvent:  # its place is theirs
        return None
    leg.lease = attempts.fleet.pick(call, [*tried, call.lease.backend], leg)
    if leg.lease is None:
        return None
    backend = leg.lease.backend
    if backend.engine is not None and backend.engine.waiting > 0:
        leg.end()
        return None
    attempts.retries.spend()
    call.exchange.attempts += 1
    leg.exchange.backend = backend.name
    call.others, call.hedged = (leg,), True
    attempts.observer.retried(call.exchange, "hedge")
    return leg


async def _first(attempts: Attempts, call: Call, running: dict[asyncio.Task[Said], Leg]) -> tuple[Leg, ResponseHead]:
    """Who wins, and what it answered; or who was the first to be full or broken, where nobody wins. Raises what the two
    failures come to."""
    failed: list[tuple[Failure, str | None]] = []
    spare: tuple[Leg, ResponseHead] | None = None
    while running:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in running if task in done]:
            leg, answer = running.pop(task), task.result()
            if isinstance(answer, ResponseHead):
                if wins(answer):
                    return leg, answer
                if leg.lease is not None:
                    attempts.turned_down(leg.lease.backend, answer)
                spare = spare or (leg, answer)
            elif isinstance(answer, (UpstreamFailed, EngineRefused)):
                failed.append((answer, leg.exchange.backend))
                attempts.failed(leg, answer)
                leg.end()
                attempts.admission.wake()
            elif running and answer.outcome is not Outcome.TIMEOUT_TOTAL:
                leg.end()  # there are no descriptors left for this one: the other one has its own
                attempts.admission.wake()
            else:  # of the whole exchange: its time is over
                raise answer
    if spare is not None:
        call.judged = True
        return spare
    worst = functools.reduce(better, [failure for failure, _ in failed])
    call.exchange.backend = next(backend for failure, backend in failed if failure is worst)
    attempts.observer.hedged(call.exchange, "failed")
    raise worst


def _response(said: Said) -> ResponseHead:
    if isinstance(said, ResponseHead):
        return said
    raise said


def _take_over(call: Call, leg: Leg) -> None:
    """The hedge is the call's own leg now; what the first one had ends here."""
    call.end()
    call.become(leg)
    exchange, marks = call.exchange, leg.exchange
    exchange.backend, exchange.phase = marks.backend, marks.phase
    exchange.connect_began, exchange.connected = marks.connect_began, marks.connected
    exchange.sent, exchange.head_received = marks.sent, marks.head_received
