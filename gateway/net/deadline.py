"""Deadlines that are fair: time in which this process did not look at what had come is not held against anybody.

A process that is stopped, starved of its processor, or on a machine that is paused finds all its timers over when it goes on,
and runs them before it reads what its sockets hold. Who answered in time would be told to be late, and engines that are well
be ejected, all at once. So a deadline that is noticed late is put off a little (`put_off`), and again where that is noticed
late, too; but not for ever, as on a machine that is always late nothing would end.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

LATE = 0.1  # seconds; a timer that is later than that was held up
PUT_OFF_MOST = 1.0  # seconds
TIMES_MOST = 3


def put_off(due: float, seconds: float, times: int) -> float:
    """What to add to a deadline of `seconds` that was over at `due`, when its timer runs, and that has been put off so many
    times; 0: it is over."""
    late = time.monotonic() - due
    return min(late, max(seconds, LATE), PUT_OFF_MOST) if late > LATE and times < TIMES_MOST else 0.0


class Deadline:
    """For what the task at hand awaits: `asyncio.timeout`, at half the price, which each pair of legs pays.

    Runs from now on: when it is over the task is cancelled, which whoever catches that asks `passed` about.
    """

    __slots__ = ("_cancelling", "_over", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float):
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task, self._cancelling, self._over, self._seconds = task, task.cancelling(), False, seconds
        self._timer = loop.call_later(seconds, self._pass, time.monotonic() + seconds)

    def _pass(self, due: float, times: int = 0) -> None:
        more = put_off(due, self._seconds, times)
        if more:
            self._timer = asyncio.get_running_loop().call_later(more, self._pass, time.monotonic() + more, times + 1)
            return
        self._over = True
        self._task.cancel()

    def passed(self) -> bool:
        """Whether it is this deadline that has cancelled the task, and nobody else, too. Asked once."""
        over, self._over = self._over, False
        return over and self._task.uncancel() <= self._cancelling

    def end(self) -> None:
        self._timer.cancel()
        self.passed()  # where it was over, and something else came of that


class within:
    """`with within(2): await ...` raises TimeoutError, as `asyncio.timeout` does."""

    __slots__ = ("_deadline", "_seconds")

    def __init__(self, seconds: float):
        self._seconds = seconds

    def __enter__(self) -> None:
        self._deadline = Deadline(self._seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        passed = kind is asyncio.CancelledError and self._deadline.passed()
        self._deadline.end()
        if passed:
            raise self.over() from error

    def over(self) -> Exception:
        """What it raises."""
        return TimeoutError()
