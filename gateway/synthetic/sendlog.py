"""When each event was to leave, and when it did: the truth that a measurement is held against.

Moments are nanoseconds of the machine's monotonic clock, which all its processes share. Bounded: so many of the latest
requests, and of each so many events.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

RUNNING: Final = "running"
_MOST_REQUESTS: Final = 256
_MOST_EVENTS: Final = 2048


@dataclass(slots=True)
class Entry:
    """One request. `planned` and `sent` are seconds of the monotonic clock, the same event at the same place. `plan` tells,
    when asked, how the answer was to be."""

    id: str
    path: str
    index: int
    arrived: float
    plan: Callable[[], dict[str, str]]
    planned: array[float] = field(default_factory=lambda: array("d"))
    sent: array[float] = field(default_factory=lambda: array("d"))
    octets: int = 0
    ended: str = RUNNING
    faults: list[str] = field(default_factory=list)

    def add(self, planned: float, sent: float, octets: int) -> None:
        self.octets += octets
        if len(self.sent) < _MOST_EVENTS:
            self.planned.append(planned)
            self.sent.append(sent)

    def summary(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "index": self.index,
            "path": self.path,
            "arrived_ns": _ns(self.arrived),
            "ended": self.ended,
            "faults": self.faults,
            "writes": len(self.sent),
            "bytes": self.octets,
        }

    def whole(self) -> dict[str, Any]:
        pairs = zip(self.planned, self.sent, strict=True)
        events = [{"planned_ns": _ns(planned), "sent_ns": _ns(sent)} for planned, sent in pairs]
        return {**self.summary(), "plan": self.plan(), "events": events}


class SendLog:
    """The latest requests by their ids. An id that comes again stands for the later one."""

    def __init__(self, most: int = _MOST_REQUESTS):
        self._most = most
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def begin(self, entry: Entry) -> Entry:
        self._entries.pop(entry.id, None)
        self._entries[entry.id] = entry
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)
        return entry

    def find(self, id_: str) -> Entry | None:
        return self._entries.get(id_)

    def summaries(self) -> list[dict[str, Any]]:
        """The latest first."""
        return [entry.summary() for entry in reversed(self._entries.values())]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
