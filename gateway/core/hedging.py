"""When a second backend is asked while the first one has not answered (models.NAME.hedge), and whose word counts."""

from __future__ import annotations

from typing import NamedTuple

from gateway.core.head import ResponseHead
from gateway.errors import EngineRefused, UpstreamFailed

Failure = UpstreamFailed | EngineRefused


class Hedge(NamedTuple):
    """Seconds from the first attempt's beginning until a second one is made. None: never."""

    after: float  # for a stream: to its first event that says something
    unstreamed: float | None = None  # for an answer in one piece: to its head, which an engine sends when all is generated

    def delay(self, stream: bool | None) -> float | None:
        return self.after if stream else self.unstreamed


def wins(response: ResponseHead) -> bool:
    """Whether a response ends the race. A backend that says it is full, or broken, does not while the other one may do."""
    return response.status < 500 and response.status != 429


def better(one: Failure, other: Failure) -> Failure:
    """Of two failures, what tells the client more: an engine's own words, the client's own fault before all, then whatever
    is not just a connection."""
    return max(one, other, key=_tells)  # of equals the first


def _tells(failure: Failure) -> int:
    if isinstance(failure, EngineRefused):
        return 3 if failure.status < 500 else 2
    return 0 if failure.code == "stale_connection" else 1
