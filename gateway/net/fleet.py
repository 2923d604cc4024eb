"""Where a request can go: the backends, and the connections to each. A reload or discovery may change both at any await."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from gateway.core.backend import Backend, Lease
from gateway.core.pool import Pool
from gateway.errors import Refusal
from gateway.net.call import Call
from gateway.net.upstream import ConnectionPool

Connections = dict[str, ConnectionPool]  # by the backend's name


class Fleet:
    """`loopback`: the embedded synthetic upstream, where /loadtest is served."""

    def __init__(self, pool: Pool, connections: Connections, loopback: tuple[Pool, Connections] | None = None):
        self.pool, self.connections, self.loopback = pool, connections, loopback

    def pick(self, call: Call, tried: Sequence[Backend] = ()) -> Lease | None:
        """A lease, and in the same step the connections that belong to it, which `call` is given."""
        pool, connections = self._of(call)
        stream = call.exchange.stream is True
        lease = pool.pick(time.monotonic(), tried, key=call.key, tokens=call.tokens, chance=random.random(), stream=stream)
        if lease is not None:
            call.connections = connections[lease.backend.name]
        return lease

    def nobody(self, call: Call) -> Refusal:
        """Why there is no backend for it."""
        return self._of(call)[0].nobody()

    def _of(self, call: Call) -> tuple[Pool, Connections]:
        if self.loopback is not None and call.route is not None and call.route.loopback:
            return self.loopback
        return self.pool, self.connections
