"""The records that the life of a request is written on: what the operator decided, and what one exchange holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from gateway.core.admission import Quotas
from gateway.core.affinity import Keys
from gateway.core.backend import Backend
from gateway.core.dialects import DEFAULT, Dialect
from gateway.core.exchange import Exchange
from gateway.core.hedging import Hedge
from gateway.core.inspection import Inspector
from gateway.core.jsonbody import Members
from gateway.core.models import Way
from gateway.core.priority import Classes
from gateway.core.routing import Paths, Route
from gateway.errors import Ended, Refusal
from gateway.net.downstream import Request
from gateway.net.legs import Leg
from gateway.net.relay import Relay
from gateway.net.tunnel import Tunnel
from gateway.net.watch import NEVER, Timeouts

if TYPE_CHECKING:
    from gateway.net.aim import Aim
    from gateway.net.paired import Paired, PairSettings


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
    pairs: PairSettings | None = None  # some requests are served by a prefill and a decode backend
    without: frozenset[bytes] = frozenset()  # names of fields that do not pass to backends
    looks: bool = True  # some rule needs the body to be looked into
    keys: Keys | None = None  # what requests are kept together by, where the balancing asks for it
    classes: Classes = dataclasses.field(default_factory=Classes)  # of priority
    hedges: Mapping[str, Hedge] | None = None  # by the model's name; None: no model has one
    migrations: Mapping[str, int] | None = None  # how many a stream may make, by the model's name
    renamed: frozenset[str] = frozenset()  # aliases that answers are to name (models.NAME.rewrite_response)
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


class Call(Leg):
    """What one exchange holds, and what can end it from outside. Attributes stand at what the class says until they come.

    It is itself the leg whose answer is relayed; `others` are those under way beside it.
    """

    route: Route | None = None
    interrupted: Ended | Refusal | None = None
    slot: Quotas | None = None  # of the admission, and what goes back with it
    way: Way | None = None  # that requests for its model take
    aim: Aim | None = None  # other ways, where the model is an alias
    target: bytes | None = None  # as it is sent, where an alias stood in it
    usage_asked = False  # by the gateway, not by the client
    key: float | None = None  # what it is kept together with others by
    tokens = 0  # of its prompt, about
    look_at = NEVER  # when its deadlines are next to be looked at
    others: tuple[Leg, ...] = ()
    asked: Upload | None = None  # the request's body, where its stream may be gone on with elsewhere
    repeated = 0  # of its attempts, those that were one made again, whose kept connection proved stale
    hedged = False  # a second attempt has been made beside the first
    doubted: tuple[Backend, ...] = ()  # who answered one leg with an error, for which another one is tried
    judged = False  # what its answer says of its backend has been taken in already
    relay: Relay | Tunnel | None = None
    paired: Paired | None = None  # the pair of legs that serves it, where it is disaggregated
    receipt = b""  # lines for the client about how it was served

    def __init__(self, exchange: Exchange, request_id: bytes, request: Request, policy: Policy):
        self.exchange = exchange
        self.request_id, self.request, self.policy = request_id, request, policy
        self.client, self.task = request.client, request.client.task

    @property
    def dialect(self) -> Dialect:
        """How errors are worded for this caller."""
        return DEFAULT if self.route is None or self.route.dialect is None else self.route.dialect

    def interrupt(self, reason: Ended | Refusal) -> None:
        """End the exchange from outside: the drain limit, an operator's word; or, before it is relayed, a refusal."""
        if self.interrupted is None:
            self.interrupted = reason
            if self.relay is not None and not self.relay.done.done():
                self.relay.fail(reason)
            elif self.task is not None:
                if self.paired is not None:
                    self.paired.part()  # as where its client leaves: what must outlive it is not cut with the task
                self.task.cancel()

    def let_go(self) -> None:
        """End whatever is under way with any backend."""
        self.look_at = NEVER
        self.drop()
        for leg in self.others:
            leg.drop()

    def write(self, octets: bytes) -> None:
        """To the client, if it is still there."""
        transport = self.client.transport
        if transport is not None:
            transport.write(octets)
