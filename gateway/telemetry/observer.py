"""Several observers as one, none of which can break the relay.

Whoever watches is a guest of the data path: what it raises is logged, once for each kind of mistake, and swallowed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gateway.core.exchange import Exchange, Observer

log = logging.getLogger(__name__)


class Silent:
    """An observer of nothing: the base of those that want to hear of some things only."""

    __slots__ = ()

    def ended(self, exchange: Exchange) -> None:
        pass

    def paused(self, exchange: Exchange) -> None:
        pass

    def resumed(self, exchange: Exchange, seconds: float) -> None:
        pass

    def aborted(self, exchange: Exchange, seconds: float) -> None:
        pass

    def retried(self, exchange: Exchange, reason: str) -> None:
        pass

    def hedged(self, exchange: Exchange, result: str) -> None:
        pass

    def migrated(self, exchange: Exchange, reason: str) -> None:
        pass

    def failed(self, exchange: Exchange, reason: str) -> None:
        pass

    def connection(self, backend: str, *, reused: bool) -> None:
        pass


class Observers:
    """Each part is told only of what it wants to hear: what `Silent` says of it costs nothing."""

    __slots__ = (
        "_aborted",
        "_complained",
        "_connection",
        "_ended",
        "_failed",
        "_hedged",
        "_migrated",
        "_paused",
        "_resumed",
        "_retried",
    )

    def __init__(self, *parts: Observer):
        self._complained: set[tuple[type, type]] = set()
        self._ended = [part.ended for part in parts if _listens(part, "ended")]
        self._paused = [part.paused for part in parts if _listens(part, "paused")]
        self._resumed = [part.resumed for part in parts if _listens(part, "resumed")]
        self._aborted = [part.aborted for part in parts if _listens(part, "aborted")]
        self._retried = [part.retried for part in parts if _listens(part, "retried")]
        self._hedged = [part.hedged for part in parts if _listens(part, "hedged")]
        self._migrated = [part.migrated for part in parts if _listens(part, "migrated")]
        self._failed = [part.failed for part in parts if _listens(part, "failed")]
        self._connection = [part.connection for part in parts if _listens(part, "connection")]

    def ended(self, exchange: Exchange) -> None:
        for tell in self._ended:
            try:
                tell(exchange)
            except Exception as error:  # whatever it is, the relay goes on
                self._complain(tell, error)

    def paused(self, exchange: Exchange) -> None:
        self._tell(self._paused, exchange)

    def resumed(self, exchange: Exchange, seconds: float) -> None:
        self._tell(self._resumed, exchange, seconds)

    def aborted(self, exchange: Exchange, seconds: float) -> None:
        self._tell(self._aborted, exchange, seconds)

    def retried(self, exchange: Exchange, reason: str) -> None:
        self._tell(self._retried, exchange, reason)

    def hedged(self, exchange: Exchange, result: str) -> None:
        self._tell(self._hedged, exchange, result)

    def migrated(self, exchange: Exchange, reason: str) -> None:
        self._tell(self._migrated, exchange, reason)

    def failed(self, exchange: Exchange, reason: str) -> None:
        self._tell(self._failed, exchange, reason)

    def connection(self, backend: str, *, reused: bool) -> None:
        for tell in self._connection:
            try:
                tell(backend, reused=reused)
            except Exception as error:
                self._complain(tell, error)

    def _tell(self, whom: Sequence[Callable[..., None]], *what: object) -> None:
        for tell in whom:
            try:
                tell(*what)
            except Exception as error:
                self._complain(tell, error)

    def _complain(self, tell: Callable[..., None], error: Exception) -> None:
        part = type(getattr(tell, "__self__", tell))
        kind = (part, type(error))
        if kind not in self._complained:
            self._complained.add(kind)
            log.error("%s failed, and will not be heard of again for this", part.__name__, exc_info=error)


def _listens(part: Observer, what: str) -> bool:
    return getattr(type(part), what, None) is not getattr(Silent, what)
