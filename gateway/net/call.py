"""The records that the life of a request is written on: what the operator decided, and what one exchange holds."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from gateway.core.admission import Quotas
from gateway.core.affinity import Keys
from gateway.core.backend import Lease
from gateway.core.dialects import DEFAULT, Dialect
from gateway.core.exchange import Exchange
from gateway.core.inspection import Inspector
from gateway.core.jsonbody import Members
from gateway.core.models import Way
from gateway.core.priority import Classes
from gateway.core.routing import Paths, Route
from gateway.errors import Ended
from gateway.net.downstream import Request
from gateway.net.hold import Hold
from gateway.net.relay import Relay
from gateway.net.tunnel import Tunnel
from gateway.net.upstream import Connection, ConnectionPool
from gateway.net.watch import NEVER, Timeouts

if TYPE_CHECKING:
    from gateway.net.aim import Aim


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What the operator decided, as one snapshot: an exchange lives by the one it began with."""

    paths: Paths
    inspector: Inspector
    timeouts: Timeouts
    request_body: int = 67108864
    forwarded: bool = True
    error_events: bool = False  # on_truncation: error_event
    hold: bool = False  # commit: first_event
    receipt: bool = False  # headers.receipt
    comment: float | None = None  # keepalive_comment.interval
    coalesce: tuple[float, int] | None = None  # seconds, octets
    looks: bool = True  # some rule needs the body to be looked into
    keys: Keys | None = None  # what requests are kept together by, where the balancing asks for it
    classes: Classes = dataclasses.field(default_factory=Classes)  # of priority
    step: float = 60.0  # seconds after which a running exchange is first looked at (`Timeouts.shortest`)


class Local(NamedTuple):
    """An answer that the gateway gives itself, where several backends stand behind one page."""

    status: int
    body: bytes


class Upload:
    """A request's body on its way to the backend: what is held, and, if it is not all of it, a source for the rest."""

    __slots__ = ("held", "kept", "length", "members", "models", "place")

    def __init__(self, held: bytes, length: int | None, *, kept: bool = True, members: Members | None = None):
        self.held = held
        self.length = length  # of the whole body; None where only its end will tell
        self.kept = kept  # what is held is all of it
        self.members = members  # still looking for refused members in what comes
        self.models = 0  # of those found so far, how many name the model that it was sent by; none may come after them
        self.place: tuple[int, int] | None = None  # of its model, where it is a form


class Call:
    """What one exchange holds, and what can end it from outside. Attributes stand at what the class says until they come."""

    route: Route | None = None
    interrupted: Ended | None = None
    slot: Quotas | None = None  # of the admission, and what goes back with it
    way: Way | None = None  # that requests for its model take
    aim: Aim | None = None  # other ways, where the model is an alias
    usage_asked = False  # by the gateway, not by the client
    key: float | None = None  # what it is kept together with others by
    tokens = 0  # of its prompt, about
    lease: Lease | None = None
    connections: ConnectionPool | None = None  # of the leased backend, as it was when the lease was taken
    connection: Connection | None = None
    look_at = NEVER  # when its deadlines are next to be looked at
    upload: asyncio.Task[None] | None = None
    hold: Hold | None = None  # of a stream that is held back until it says something
    relay: Relay | Tunnel | None = None

    def __init__(self, exchange: Exchange, request_id: bytes, request: Request, policy: Policy):
        self.exchange, self.request_id, self.request, self.policy = exchange, request_id, request, policy
        self.client, self.task = request.client, request.client.task

    @property
    def dialect(self) -> Dialect:
        """How errors are worded for this caller."""
        return DEFAULT if self.route is None or self.route.dialect is None else self.route.dialect

    def interrupt(self, reason: Ended) -> None:
        """End the exchange from outside: the drain limit, an operator's word."""
        if self.interrupted is None:
            self.interrupted = reason
            if self.relay is not None and not self.relay.done.done():
                self.relay.fail(reason)
            elif self.task is not None:
                self.task.cancel()

    def let_go(self) -> None:
        """End whatever is under way with the backend."""
        self.look_at = NEVER
        if self.upload is not None:
            self.upload.cancel()
        if self.connection is not None:
            self.connection.drop()
            self.connection = None

    def write(self, octets: bytes) -> None:
        """To the client, if it is still there."""
        transport = self.client.transport
        if transport is not None:
            transport.write(octets)
