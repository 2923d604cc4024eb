"""A deadline for what the task at hand awaits: `asyncio.timeout`, at half the price, which each pair of legs pays."""

from __future__ import annotations

import asyncio


class Deadline:
    """Runs from now on: when it is over the task is cancelled, which whoever catches that asks `passed` about."""

    __slots__ = ("_cancelling", "_over", "_task", "_timer")

    def __init__(self, seconds: float):
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task, self._cancelling, self._over = task, task.cancelling(), False
        self._timer = loop.call_later(seconds, self._pass)

    def _pass(self) -> None:
        self._over = True
        self._task.cancel()

    def passed(self) -> bool:
        """Whether it is this deadline that has cancelled the task, and nobody else, too. Asked once."""
        over, self._over = self._over, False
        return over and self._task.uncancel() <= self._cancelling

    def end(self) -> None:
        self._timer.cancel()
        self.passed()  # where it was over, and something else came of that
