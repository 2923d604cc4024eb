"""Where a request can go: the backends, and the connections to each. A reload or discovery may change both at any await."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from gateway.core.backend import Backend, Lease
from gateway.core.disagg.base import Engine
from gateway.core.head import RequestHead
from gateway.core.models import Models, Rule, Way
from gateway.core.pool import Pool
from gateway.errors import Refusal
from gateway.net.aim import Aim, aim
from gateway.net.call import Call, Upload
from gateway.net.legs import Leg
from gateway.net.upstream import ConnectionPool

Connections = dict[str, ConnectionPool]  # by the backend's name
_NOBODY = Pool([])


class Fleet:
    """`loopback`: the embedded synthetic upstream, where /loadtest is served."""

    def __init__(self, models: Models, connections: Connections, loopback: tuple[Way, Connections] | None = None):
        self.models, self.connections, self.loopback = models, connections, loopback
        self.roles = {"encode": Models(), "prefill": Models(), "decode": Models()}  # who serves one leg only, by model
        self.engines: Mapping[str, Engine] = {}  # those of these, by the backend's name

    def apply(
        self,
        backends: Sequence[Backend],
        connections: Connections,
        engines: Mapping[str, Engine],
        balance: str,
        load_factor: float,
        rules: Mapping[str, Rule],
    ) -> None:
        """A new membership, whole. What is not disaggregated goes to whoever decodes: never to one that only prefills or
        encodes."""
        self.models.apply([b for b in backends if b.role not in ("prefill", "encode")], balance, load_factor, rules)
        for role, models in self.roles.items():
            models.lone = not self.models.merged
            models.apply([b for b in backends if b.role == role], balance, load_factor)
        self.connections, self.engines = connections, engines

    def learn(self) -> None:
        """Some backend's list of models has changed."""
        for models in (self.models, *self.roles.values()):
            models.learn()

    @property
    def pool(self) -> Pool:
        """All backends that answer clients."""
        return self.models.whole

    @property
    def disaggregated(self) -> bool:
        return any(models.whole.backends for models in self.roles.values())

    @property
    def routable(self) -> bool:
        """Some request can be served: by one backend, or by two."""
        whole = any(b.routable and b.role == "both" for b in self.pool.backends)
        return whole or all(self.roles[role].whole.routable for role in ("prefill", "decode"))

    def aim(self, call: Call, upload: Upload) -> Way:
        """Find the call's way, by its model. Raises Refusal where nobody knows that."""
        if self._loops_back(call):
            assert self.loopback is not None
            call.way = self.loopback[0]
        else:
            aim(call, self.models, upload, random.random())
        assert call.way is not None
        return call.way

    def pick(self, call: Call, tried: Sequence[Backend] = (), leg: Leg | None = None) -> Lease | None:
        """A lease, and in the same step the connections that belong to it, which `leg` is given; None: the call itself.

        Where the call's model is an alias, and nobody who serves the one it stands for so far can be reached, or all of them
        have been tried or are full, it goes on to the next one; but not for a leg beside, whose body is that of the first one.
        """
        assert call.way is not None
        lease = self._lease(call, call.way.backends, tried)
        if leg is None:
            while lease is None and call.aim is not None and self._leads_on(call, call.aim, tried) and call.aim.go_on(call):
                lease = self._lease(call, call.way.backends, tried)
        if lease is not None:
            connections = self.loopback[1] if self.loopback is not None and self._loops_back(call) else self.connections
            (call if leg is None else leg).connections = connections[lease.backend.name]
        return lease

    def _leads_on(self, call: Call, aim: Aim, tried: Sequence[Backend]) -> bool:
        """Whether an alias' call that nobody takes now goes on. A second try stays with those who are full, to wait for them,
        where no other target has room either."""
        assert call.way is not None
        if not tried:
            return not call.way.backends.routable
        now = time.monotonic()
        if not call.way.backends.others(tried, now):
            return True
        return any(not b.full for way in aim.left for b in way.backends.others(tried, now))

    def held_up(self, call: Call, tried: Sequence[Backend]) -> bool:
        """Whether somebody could serve its second try who is only full."""
        assert call.way is not None
        return call.way.backends.held_up(tried, time.monotonic())

    def _lease(self, call: Call, pool: Pool, tried: Sequence[Backend]) -> Lease | None:
        stream = call.exchange.stream is True
        return pool.pick(time.monotonic(), tried, key=call.key, tokens=call.tokens, chance=random.random(), stream=stream)

    def of(self, role: str, call: Call) -> Pool:
        """The backends of that role that serve the call's model."""
        return self.of_model(role, self.model_of(call))

    def model_of(self, call: Call) -> str | None:
        """As backends call it."""
        way = call.way
        return None if way is None else way.rewritten or way.model or call.exchange.model

    def of_model(self, role: str, name: str | None) -> Pool:
        """`both`: those that serve whole requests, and who decodes."""
        try:
            found = (self.models if role == "both" else self.roles[role]).find(name)
        except Refusal:
            return _NOBODY
        assert isinstance(found, Way)
        return found.backends

    def pick_of(self, role: str, call: Call, leg: Leg, tried: Sequence[Backend] = (), tokens: int = 0) -> Lease | None:
        """A lease for one leg, on a backend of that role: `leg` is given it, and the connections that belong to it."""
        pool = self.of(role, call)
        lease = pool.pick(time.monotonic(), tried, key=call.key, tokens=tokens, chance=random.random())
        if lease is not None:
            leg.lease, leg.connections = lease, self.connections[lease.backend.name]
        return lease

    def pick_whole(self, call: Call) -> None:
        """Give the call a lease on a backend whose role it is to serve whole requests, if one can be had."""
        assert call.way is not None
        backends = call.way.backends.backends
        if any(b.role == "both" and b.routable for b in backends):
            call.lease = call.lease or self.pick(call, [b for b in backends if b.role != "both"])

    def serves_whole(self, call: Call) -> bool:
        return call.way is not None and any(b.role == "both" and b.routable for b in call.way.backends.backends)

    def nobody(self, call: Call) -> Refusal:
        """Why there is no backend for it."""
        assert call.way is not None
        return call.way.backends.nobody(call.exchange.model if call.way.model is not None else None)

    def lists_models(self, call: Call, head: RequestHead) -> bool:
        """Whether what is asked for is a page of models, and it is made here."""
        route = call.route
        assert route is not None
        listed = route.path == b"/v1/models" or route.path.startswith(b"/v1/models/")
        return listed and head.method == b"GET" and self.models.merged and not self._loops_back(call)

    def _loops_back(self, call: Call) -> bool:
        return self.loopback is not None and call.route is not None and call.route.loopback
