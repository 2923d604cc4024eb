"""Who may go on now, who waits, and who is turned away: a limit on exchanges in flight, and a bounded queue before it.

First come, first served. The queue is empty unless the limit is reached, so that in the common case admission is one
comparison. Whoever leaves the queue (its turn, its deadline, its client gone) leaves it at once.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.errors import Refusal


class Ticket:
    """A place in the queue. `granted` is called once, when its turn has come and its slot is taken."""

    __slots__ = ("granted",)

    def __init__(self, granted: Callable[[], None]):
        self.granted = granted


class Admission:
    def __init__(self, in_flight: int | None, queue: int, has_room: Callable[[], bool]):
        self.limit, self.queue_limit = in_flight, queue
        self.in_flight = 0
        self._has_room = has_room  # of the backends
        self._waiting: dict[Ticket, None] = {}  # in order of arrival

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _open(self) -> bool:
        return (self.limit is None or self.in_flight < self.limit) and self._has_room()

    def enter(self) -> bool:
        """Take a slot if nobody has to wait for one. Whoever gets False asks for a `ticket`."""
        if self._waiting or not self._open():
            return False
        self.in_flight += 1
        return True

    def ticket(self, granted: Callable[[], None]) -> Ticket:
        """Raises Refusal where the queue is full."""
        if len(self._waiting) >= self.queue_limit:
            raise Refusal("queue_full", f"{len(self._waiting)} requests are waiting already (limits.queue)", retry_after=1)
        ticket = Ticket(granted)
        self._waiting[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give up waiting."""
        self._waiting.pop(ticket, None)

    def release(self) -> None:
        """Give back a slot."""
        if self.in_flight <= 0:
            raise AssertionError("a slot was given back that nobody held")
        self.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Let in whoever may go on now. Called whenever that may have changed."""
        while self._waiting and self._open():
            ticket = next(iter(self._waiting))
            del self._waiting[ticket]
            self.in_flight += 1
            ticket.granted()
