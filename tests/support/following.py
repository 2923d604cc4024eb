"""A source of backends, followed as the gateway follows it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from gateway.control.discovery import Snapshot, Source
from gateway.control.discovery import owner as owners
from gateway.control.discovery.owner import Discovery
from gateway.errors import ConfigError
from tests.support.gateway import until


class Follower:
    """What one source has said, by way of its owner."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.refusal: str | None = None  # why what it says cannot be put in force
        self.sources: list[Source] = []
        self.discovery = Discovery(self._publish, lambda: 1.0)

    def _publish(self, name: str, snapshot: Snapshot) -> None:
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        self.snapshots.append(snapshot)

    @property
    def names(self) -> list[str] | None:
        return [member.name for member in self.snapshots[-1]] if self.snapshots else None

    async def say(self, *names: str) -> None:
        """Wait until it says that these are all there are."""
        await until(lambda: self.names == list(names), f"{names} and not {self.names}")


@contextlib.asynccontextmanager
async def following(*sources: Source, pause: float = 0.02, patch: Callable[..., Any]) -> AsyncIterator[Follower]:
    """`patch`: pytest's monkeypatch.setattr; pauses after failures are short here."""
    patch(owners, "FIRST_PAUSE", pause)
    follower = Follower()
    follower.sources += sources
    staged = await follower.discovery.stage(sources, 5)
    for one in staged:
        if one.snapshot is not None:
            follower.snapshots.append(one.snapshot)
    follower.discovery.commit(staged)
    try:
        yield follower
    finally:
        await follower.discovery.stop()
