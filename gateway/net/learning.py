"""What connectors must learn of a prefill engine before it can be used: Mooncake's engine ids, of its bootstrap server.

They are asked for when they are first needed, and again after any failure: an engine that restarts has others. And what an
engine shows by itself: whether it stages KV where its one token ends the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gateway.core.disagg.base import Connector, Engine, bracketed
from gateway.errors import UpstreamFailed
from gateway.net.call import Call
from gateway.net.fetch import fetch
from gateway.net.timed import Timed
from gateway.net.upstream import ConnectionPool, Origin, PoolSettings

ANSWER_MOST = 1 << 20
NAMES_MOST = 10_000

log = logging.getLogger(__name__)


class Learning:
    def __init__(self) -> None:
        self._known: list[tuple[Engine, Mapping[int, str]]] = []
        self._capped: set[str] = set()  # names of prefill engines

    def capped(self, name: str) -> bool:
        """Whether a prefill engine is to be asked in a way in which its token ends no answer (`base.Pair.capped`)."""
        return name in self._capped

    def cap(self, name: str) -> None:
        if len(self._capped) >= NAMES_MOST:
            self._capped.clear()
        self._capped.add(name)
        log.warning(
            "the prefill backend %s handed nothing over, as its first token ended the answer: from now on it is asked with "
            "min_tokens 1; for engines of vLLM Ascend set disaggregation.connector (--kv-connector) to mooncake_ascend",
            name,
        )

    def forget(self, engine: Engine) -> None:
        self._known = [(known, ids) for known, ids in self._known if known.name != engine.name]

    async def of(self, call: Call, connector: Connector, engine: Engine) -> Engine:
        """The engine, with what is to be known of it. Raises Refusal."""
        key = engine._replace(engine_ids={})
        found = next((ids for known, ids in self._known if known == key), None)
        if found is None:
            url = connector.ask(engine)
            seconds = call.policy.timeouts.connect
            words = "the engine ids of the backend %s could not be learnt of %s within %g s"
            with Timed(call, seconds, "timeout_connect", words, engine.name, url, seconds):
                status, answer = await _get(url, engine)
            if status != 200:
                raise UpstreamFailed(
                    "upstream_connect", f"{url} of the backend {engine.name} answers with {status}", unsent=True
                )
            try:
                found = connector.learn(answer)
            except ValueError as wrong:
                raise UpstreamFailed("upstream_connect", f"{url} of the backend {engine.name}: {wrong}", unsent=True) from None
            self.forget(engine)
            self._known.append((key, found))
        return engine._replace(engine_ids=found)


async def _get(url: str, engine: Engine) -> tuple[int, bytes]:
    authority, _, path = url.removeprefix("http://").partition("/")
    assert engine.bootstrap_port is not None and authority == f"{bracketed(engine.kv_name)}:{engine.bootstrap_port}"
    origin = Origin(engine.name, engine.kv_name, engine.bootstrap_port, None, authority.encode())
    return await fetch(ConnectionPool(origin, PoolSettings(), asyncio.get_running_loop()), f"/{path}", ANSWER_MOST)
