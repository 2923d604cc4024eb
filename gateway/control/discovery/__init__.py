"""Where backends that come and go are learnt of: one file a kind of source.

A source yields *snapshots*: all the backends that it knows, each time that they may have changed. What it cannot read, or
cannot make sense of, it raises as `SourceFailed`, whole: half a list would send backends away that are well. Its owner
(`owner`) waits a while, and asks it for snapshots again; what it said last holds until then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable
from typing import NamedTuple, Protocol

from gateway.core.members import Member, Tls
from gateway.errors import GatewayError

Snapshot = tuple[Member, ...]


class SourceFailed(GatewayError):
    """A source has nothing that can be used. Its text says what, where and how to mend it, without the source's name."""


class Source(Protocol):
    @property
    def name(self) -> str:
        """Unique among sources: in logs, and in /-/backends."""

    @property
    def settings(self) -> Hashable:
        """Two sources of equal settings say the same."""

    @property
    def longest_pause(self) -> float:
        """Seconds after a failure until it is asked again, however often it failed."""

    def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        """The first one as soon as it is known, then each that may differ; never ends. Raises SourceFailed. Called again
        after that, it may go on from where it was."""


class Common(NamedTuple):
    """What is said of all backends of one source alike."""

    scheme: str = "http"
    role: str = "both"
    max_in_flight: int | None = None
    credential: bytes | None = None
    tls: Tls = Tls()
