"""Who may go on now, who waits, and who is turned away: limits on exchanges in flight, and one bounded queue before them.

The queue is a set of lines: one for each model, or whatever else has its own backends or limits. A request waits only for
what it needs itself; one whose backends are full holds up nobody who goes elsewhere. Turns are given by these rules:

 1. Nobody whose line has no room has a turn.
 2. Of the others the highest class is first; within a class, whoever came first.
 3. But each `FAIR`th turn, of a line and of all, is of whoever has waited longest, whatever the class: the lowest class has
    a quarter of the turns, if it needs it, and is never starved.

As long as a limit is not reached nobody waits, and admission is a few comparisons. Whoever leaves the queue (its turn, its
deadline, its client gone) leaves it at once. Whoever would wait longer than it may is turned away at once, too, where the turns
that came tell so (`core.pace`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from gateway.core.pace import Pace
from gateway.errors import Refusal

FAIR = 4
RETRY_MOST = 120  # seconds that a client is told to wait at most


class Room(Protocol):
    """Where a line leads to: a pool. `in_flight`: how many it holds, all of them together; None: nobody knows."""

    @property
    def in_flight(self) -> int | None: ...

    def has_room(self, clock: Callable[[], float]) -> bool: ...


class Quota:
    """A limit of its own on the exchanges in flight under one name (`models.NAME.in_flight`)."""

    __slots__ = ("in_flight", "limit", "name")

    def __init__(self, name: str, limit: int | None = None):
        self.name, self.limit, self.in_flight = name, limit, 0


Quotas = tuple[Quota, ...]


class Ticket:
    """A place in the queue. `granted` is called once, when its turn has come and its slot is taken."""

    __slots__ = ("granted", "line", "number", "rank")

    def __init__(self, line: Line, rank: int, number: int, granted: Callable[[], None]):
        self.line, self.rank, self.number, self.granted = line, rank, number, granted


class Line:
    """Requests that need the same. `rank`: of its class, 0 is the highest; None: as for all."""

    __slots__ = ("_places", "model", "pace", "pool", "quotas", "rank", "turns")

    def __init__(self, pool: Room, model: str | None = None, quotas: Quotas = (), rank: int | None = None):
        self.pool, self.model, self.quotas, self.rank = pool, model, quotas, rank
        self.pace, self.turns = Pace(), 0
        self._places: dict[int, dict[Ticket, None]] = {}  # by rank, each in order of arrival

    def has_room(self, clock: Callable[[], float]) -> bool:
        for quota in self.quotas:
            if quota.limit is not None and quota.in_flight >= quota.limit:
                return False
        return self.pool.has_room(clock)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._places.values()))

    def ahead(self, rank: int) -> int:
        """How many have their turn before one that comes now, but for rule 3."""
        return sum(len(places) for other, places in self._places.items() if other <= rank)

    def join(self, ticket: Ticket) -> None:
        self._places.setdefault(ticket.rank, {})[ticket] = None

    def leave(self, ticket: Ticket) -> bool:
        """Whether it was there."""
        places = self._places.get(ticket.rank, {})
        if ticket not in places:
            return False
        del places[ticket]
        if not places:
            del self._places[ticket.rank]
        return True

    def first(self, longest: bool) -> Ticket:
        """Whose turn it is, of those that wait. `longest`: whoever has waited longest."""
        if longest or self.turns % FAIR == FAIR - 1:
            return min((next(iter(places)) for places in self._places.values()), key=lambda ticket: ticket.number)
        return next(iter(self._places[min(self._places)]))


class Admission:
    """`clock`: seconds. Every slot that is taken, by `enter` or by a turn, is given back with the quotas of its line."""

    def __init__(self, in_flight: int | None, queue: int, clock: Callable[[], float]):
        self.limit, self.queue_limit = in_flight, queue
        self.in_flight = self.waiting = 0
        self._clock = clock
        self._lines: dict[Line, None] = {}  # in which somebody waits
        self._tickets = self._turns = 0

    @property
    def _full(self) -> bool:
        return self.limit is not None and self.in_flight >= self.limit

    def must_wait(self, line: Line) -> bool:
        return self._full or line in self._lines or not line.has_room(self._clock)

    def enter(self, line: Line) -> bool:
        """Take a slot if nobody has to wait for one. Whoever gets False asks for a `ticket`."""
        limit = self.limit
        if (limit is not None and self.in_flight >= limit) or line in self._lines or not line.has_room(self._clock):
            return False
        self.take(line)
        return True

    def take(self, line: Line) -> None:
        """Take a slot, whether or not there is one: also for an exchange that had one, and waited in vain for another."""
        self.in_flight += 1
        for quota in line.quotas:
            quota.in_flight += 1

    def foresee(self, line: Line, rank: int, patience: float | None) -> None:
        """Raises Refusal where one that has to wait now, and may for `patience` seconds, waits in vain: the queue is full, or
        its turn would come later than that. None: nothing is foretold of its turn."""
        now = self._clock()
        if self.waiting >= self.queue_limit:
            raise Refusal(
                "queue_full",
                f"{self.waiting} requests are waiting already (limits.queue)",
                retry_after=_retry_after(line.pace.wait(0, now) or 0.0),
            )
        ahead = line.ahead(rank)
        wait = self._wait(line, rank, ahead, now) if patience else None
        if wait is not None and patience is not None and wait > patience:
            raise Refusal(
                "overloaded",
                f"{ahead} requests wait before this one, and its turn would come in about {wait:.0f} s, "
                f"after the {patience:g} s that it may wait (timeouts.queue)",
                retry_after=_retry_after(wait - patience),
            )

    def _wait(self, line: Line, rank: int, ahead: int, now: float) -> float | None:
        wait = line.pace.wait(ahead, now)
        if wait is not None:
            return wait
        if self._full:
            return line.pace.guess(sum(other.ahead(rank) for other in self._lines), self.in_flight, now)
        held = [quota.in_flight for quota in line.quotas if quota.limit is not None and quota.in_flight >= quota.limit]
        return line.pace.guess(ahead, min(held) if held else line.pool.in_flight or 0, now)

    def ticket(self, line: Line, granted: Callable[[], None], rank: int = 0, patience: float | None = None) -> Ticket:
        """Raises Refusal, as `foresee`."""
        self.foresee(line, rank, patience)
        if line not in self._lines:
            self._lines[line] = None
            line.pace.waits(self._clock())
        self._tickets += 1
        ticket = Ticket(line, rank, self._tickets, granted)
        line.join(ticket)
        self.waiting += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give up waiting."""
        line = ticket.line
        if line.leave(ticket):
            self.waiting -= 1
            if not line.waiting:
                del self._lines[line]

    def release(self, quotas: Quotas = ()) -> None:
        """Give back a slot, and the quotas that were taken with it."""
        if self.in_flight <= 0:
            raise AssertionError("a slot was given back that nobody held")
        self.in_flight -= 1
        if quotas:
            _give_back(quotas)
        if self.waiting:
            self.wake()

    def wake(self) -> None:
        """Let in whoever may go on now. Called whenever that may have changed."""
        while self.waiting and not self._full:
            ticket = self._next()
            if ticket is None:
                return
            line = ticket.line
            self.leave(ticket)
            self.take(line)
            line.pace.turn(self._clock())
            line.turns += 1
            self._turns += 1
            ticket.granted()

    def _next(self) -> Ticket | None:
        longest = self._turns % FAIR == FAIR - 1
        firsts = [line.first(longest) for line in self._lines if line.has_room(self._clock)]
        if longest:
            return min(firsts, key=lambda ticket: ticket.number, default=None)
        return min(firsts, key=lambda ticket: (ticket.rank, ticket.number), default=None)


def exchanged(held: Quotas, line: Line) -> Quotas:
    """An exchange that has a slot goes on in another line: its quotas, whether or not they have room, for those it held."""
    for quota in line.quotas:
        quota.in_flight += 1
    _give_back(held)
    return line.quotas


def _give_back(quotas: Quotas) -> None:
    for quota in quotas:
        if quota.in_flight <= 0:
            raise AssertionError(f"a slot of {quota.name} was given back that nobody held")
        quota.in_flight -= 1


def _retry_after(seconds: float) -> int:
    return max(min(math.ceil(seconds), RETRY_MOST), 1)
