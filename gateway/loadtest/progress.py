"""The progress bar: one line on a terminal's standard error, drawn anew a few times a second; nothing anywhere else."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time

from gateway.loadtest.runner import Runner

EVERY = 0.2  # seconds
_WIDTH = 30


def line(done: int, asked: int, failed: int, under_way: int, seconds: float) -> str:
    """What is drawn."""
    share = done / asked if asked else 0.0
    filled = int(share * _WIDTH)
    bar = "█" * filled + "·" * (_WIDTH - filled)
    rate = done / seconds if seconds > 0 else 0.0
    failures = f", {failed} failed" if failed else ""
    return f"{share:4.0%} {bar} {done}/{asked}{failures}, {under_way} under way, {rate:.1f} req/s, {seconds:.0f} s"


class Progress:
    """Draws the runner's progress between `begin` and `end`."""

    def __init__(self, runner: Runner, wanted: bool):
        self._runner, self._wanted = runner, wanted and sys.stderr.isatty()
        self._timer: asyncio.Handle | None = None
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()
        if self._wanted:  # the runner, which is called next, knows what it is asked for
            self._timer = asyncio.get_running_loop().call_soon(self._draw)

    def _draw(self) -> None:
        runner = self._runner
        text = line(runner.done, runner.asked, runner.failed, runner.under_way, time.monotonic() - self._began)
        sys.stderr.write("\r" + text[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
        sys.stderr.flush()
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._draw)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
