"""A backend's refusal that is kept while another backend is asked: where that fails, the client gets it after all.

What it says of its backend has been taken in when it was put off, and is not taken in once more."""

from __future__ import annotations

import time
from typing import NamedTuple

from gateway.core.backend import Backend
from gateway.core.head import ResponseHead
from gateway.net.call import Call
from gateway.net.upstream import Connection
from gateway.net.watch import NEVER, Watch


class PutOff(NamedTuple):
    """What follows the head waits on the connection: it is not read beyond what a connection takes in unread."""

    response: ResponseHead
    connection: Connection
    backend: Backend

    def take_up(self, call: Call, watch: Watch) -> ResponseHead:
        """This is the answer after all, to whoever has failed meanwhile, with a lease of its own or with one given back."""
        if call.lease is not None:
            call.lease.release()
        now = call.exchange.head_received = time.monotonic()
        call.lease, call.judged = self.backend.lease(now=now), True
        call.exchange.backend, call.connection = self.backend.name, self.connection
        watch.begin(call, now)
        return self.response


def put_off(call: Call, response: ResponseHead, backend: Backend) -> PutOff:
    """Take it, and its connection, off the call."""
    assert call.connection is not None
    kept = PutOff(response, call.connection, backend)
    call.connection, call.look_at = None, NEVER
    return kept
