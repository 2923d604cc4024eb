"""Several observers as one, none of which can break the relay.

Whoever watches is a guest of the data path: what it raises is logged, once for each kind of mistake, and swallowed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

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

    def failed(self, exchange: Exchange, reason: str) -> None:
        pass

    def connection(self, backend: str, *, reused: bool) -> None:
        pass


class Observers:
    __slots__ = ("_complained", "_parts")

    def __init__(self, *parts: Observer):
        self._parts = parts
        self._complained: set[tuple[type, type]] = set()

    def ended(self, exchange: Exchange) -> None:
        self._tell(lambda part: part.ended(exchange))

    def paused(self, exchange: Exchange) -> None:
        self._tell(lambda part: part.paused(exchange))

    def resumed(self, exchange: Exchange, seconds: float) -> None:
        self._tell(lambda part: part.resumed(exchange, seconds))

    def aborted(self, exchange: Exchange, seconds: float) -> None:
        self._tell(lambda part: part.aborted(exchange, seconds))

    def retried(self, exchange: Exchange, reason: str) -> None:
        self._tell(lambda part: part.retried(exchange, reason))

    def failed(self, exchange: Exchange, reason: str) -> None:
        self._tell(lambda part: part.failed(exchange, reason))

    def connection(self, backend: str, *, reused: bool) -> None:
        self._tell(lambda part: part.connection(backend, reused=reused))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        for part in self._parts:
            try:
                what(part)
            except Exception as error:  # whatever it is, the relay goes on
                kind = (type(part), type(error))
                if kind not in self._complained:
                    self._complained.add(kind)
                    log.exception("%s failed, and will not be heard of again for this", type(part).__name__)
