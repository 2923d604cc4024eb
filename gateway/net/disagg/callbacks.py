"""Decode engines that ask for their prefill: they are sent the request first, and post to the gateway (layerwise)."""

from __future__ import annotations

import asyncio

from gateway.core.disagg.layerwise import Rendezvous, posted, unknown
from gateway.net.call import Call
from gateway.net.disagg.common import Means
from gateway.net.disagg.prefill import prefill
from gateway.net.paired import Paired


class Callbacks:
    def __init__(self) -> None:
        self._awaited: dict[str, tuple[Rendezvous, asyncio.Future[bytes]]] = {}  # by the attempt's id

    async def prefill(self, means: Means, call: Call, paired: Paired) -> None:
        """Prefill's leg, once decode has asked for it: exactly one request, when all of its callbacks have come."""
        assert paired.pair is not None
        name, leg = paired.pair.attempt, paired.prefill
        complete: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._awaited[name] = (Rendezvous(paired.asked, paired.pair), complete)
        try:
            await prefill(means, call, paired, await complete, leg)
        finally:
            del self._awaited[name]

    def take(self, octets: bytes) -> None:
        """A decode engine asks for its prefill. Raises Refusal: it is not one of ours, or not awaited (any more)."""
        callback = posted(octets)
        if callback.attempt not in self._awaited:
            raise unknown(callback.child)
        rendezvous, complete = self._awaited[callback.attempt]
        if rendezvous.take(callback) and not complete.done():
            complete.set_result(rendezvous.params())
