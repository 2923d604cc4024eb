"""The tasks that follow sources: one each, so that one that hangs or fails holds up no other.

    source fails         what it said last stays in force; it is asked again after a pause that doubles, with jitter
    ... again, alike     not told again
    source works again   told, and the pause begins anew
    list refused         as a failure: a list that cannot be put in force is as bad as none

A reload *stages* its new sources: they are followed, but what they say is held back until the whole reload is put in
force, or is dropped with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

from gateway.control.discovery import Snapshot, Source, SourceFailed
from gateway.errors import ConfigError
from gateway.net.tasks import Tasks

log = logging.getLogger(__name__)

FIRST_PAUSE = 1.0  # seconds after the first failure
Publish = Callable[[str, Snapshot], None]


class Followed:
    """One source, and what is known of it."""

    __slots__ = ("failure", "in_force", "settled", "snapshot", "source", "task")

    def __init__(self, source: Source):
        self.source = source
        self.snapshot: Snapshot | None = None  # the last one
        self.failure: str | None = None  # since then
        self.settled = asyncio.Event()  # one or the other is there
        self.in_force = False
        self.task: asyncio.Task[None] | None = None


class Discovery:
    """`publish`: what a source in force says now; it raises ConfigError if that cannot be put in force. `chance`: a
    random number from 0 to 1."""

    def __init__(self, publish: Publish, chance: Callable[[], float]):
        self._publish, self._chance = publish, chance
        self._tasks = Tasks()
        self._followed: list[Followed] = []

    async def stage(self, sources: Iterable[Source], seconds: float) -> list[Followed]:
        """Follow these, those that are followed already included, and wait until each new one has said something, or for
        so many seconds. Nothing of it is in force before `commit`, and `abandon` undoes it."""
        old = {one.source.settings: one for one in self._followed}
        staged = [old.get(source.settings) or Followed(source) for source in sources]
        new = [one for one in staged if not one.in_force]
        for one in new:
            one.task = self._tasks.spawn(self._follow(one), f"discovery by {one.source.name}")
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    for one in new:
                        await one.settled.wait()
        except BaseException:
            self.abandon(staged)
            raise
        return staged

    def commit(self, staged: Sequence[Followed]) -> None:
        """These are in force, and no others."""
        before, self._followed = self._followed, list(staged)
        for one in staged:
            one.in_force = True
        for one in before:
            if one not in self._followed and one.task is not None:
                one.task.cancel()

    def abandon(self, staged: Sequence[Followed]) -> None:
        for one in staged:
            if not one.in_force and one.task is not None:
                one.task.cancel()

    async def stop(self) -> None:
        await self._tasks.stop()

    async def _follow(self, one: Followed) -> None:
        source, failures = one.source, 0
        while True:
            try:
                async with contextlib.aclosing(source.snapshots()) as snapshots:
                    async for snapshot in snapshots:
                        self._take(one, snapshot)
                        if one.failure is not None:
                            log.info("discovery by %s works again", source.name)
                        failures, one.failure = 0, None
                        one.settled.set()
            except (SourceFailed, ConfigError) as error:
                if str(error) != one.failure:
                    kept = "" if one.snapshot is None else "; its last list goes on"
                    log.warning("discovery by %s: %s%s", source.name, error, kept)
                one.failure = str(error)
                one.settled.set()
            await asyncio.sleep(self._pause(source, failures))
            failures += 1

    def _take(self, one: Followed, snapshot: Snapshot) -> None:
        if snapshot == one.snapshot and one.failure is None:
            return
        if one.in_force:
            self._publish(one.source.name, snapshot)
        one.snapshot = snapshot

    def _pause(self, source: Source, failures: int) -> float:
        """Doubled each time, then cut by a random share of up to a half: those who failed together do not come together."""
        pause = min(FIRST_PAUSE * 2.0 ** min(failures, 16), source.longest_pause)
        return pause * (1 - self._chance() / 2)


def failed(staged: Iterable[Followed]) -> str | None:
    """Why one of the new ones has said nothing that can be used, if so."""
    for one in staged:
        if not one.in_force and one.snapshot is None:
            return f"discovery by {one.source.name}: {one.failure or 'it has not answered yet'}"
    return None
