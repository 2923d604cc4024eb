"""Prefill and decode engines that keep a ledger (`tokenpipe mock`'s), and what must hold at the end.

The invariants are those of the acceptance cases: I1 the ledger is empty or what is left was counted as stranded; I2 loads and
gauges are 0; I3 no connection to an engine but idle ones; I4 nothing pending; nothing recomputed in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from gateway.synthetic.server import MockSettings, SyntheticUpstream
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.pairs import loads
from tests.support.script import get, post
from tests.support.upstream import listening_socket

Start = Callable[..., Awaitable[Gateway]]
PROMPT = "tell me about the weather in all of Europe " * 20
CHAT = {"model": "synthetic", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 7}
COMPLETION = {"model": "synthetic", "prompt": PROMPT, "max_tokens": 12, "seed": 7}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BODIES = {"chat": CHAT, "completions": COMPLETION}


class Engines:
    """`prefills` and `decodes`: the mocks; `settings` of the connector's ports are worked out in `config`."""

    def __init__(self, connector: str):
        self.connector = connector
        self.prefills: list[SyntheticUpstream] = []
        self.decodes: list[SyntheticUpstream] = []

    @property
    def all(self) -> list[SyntheticUpstream]:
        return [*self.prefills, *self.decodes]

    def config(self, pool: dict[str, Any] | None = None, **disaggregation: Any) -> str:
        roles = (("prefill", self.prefills), ("decode", self.decodes))
        if self.connector == "layerwise":
            with listening_socket() as sock:
                disaggregation["metaserver"] = {"listen": f"127.0.0.1:{sock.getsockname()[1]}"}
        listed = [{"url": mock.url, "role": role, **self._ports(mock)} for role, mocks in roles for mock in mocks]
        if self.connector == "layerwise":
            disaggregation.setdefault("metaserver", {"listen": "127.0.0.1:0"})
        return json.dumps(
            {
                "listen": "127.0.0.1:0",
                "admin": {"listen": "127.0.0.1:0"},
                "health": {"interval": 60},
                **({"pool": pool} if pool else {}),
                "backends": listed,
                "disaggregation": {"connector": self.connector, **disaggregation},
            }
        )

    def _ports(self, mock: SyntheticUpstream) -> dict[str, Any]:
        """A mock has its side channels at its own port."""
        port = port_of(mock)
        names = {
            "p2p_nccl": ("kv_port",), "offloading_p2p": ("kv_port",),
            "sglang": ("bootstrap_port",), "mooncake": ("bootstrap_port",),
            "moriio_read": ("handshake_port", "notify_port"), "moriio_write": ("handshake_port", "notify_port"),
        }.get(self.connector, ())  # fmt: skip
        return {"connector": dict.fromkeys(names, port)} if names else {}

    async def states(self, mocks: list[SyntheticUpstream]) -> list[dict[str, Any]]:
        return [await asked(mock, "/admin/synth/kv") for mock in mocks]

    async def held(self) -> int:
        """But for what a decode engine keeps for a conversation's next turn, as it is to."""
        mocks = self.prefills if self.connector == "nixl_bidirectional" else self.all
        return sum([len(state["held"]) for state in await self.states(mocks)])

    async def counted(self, name: str) -> int:
        return sum([state[name] for state in await self.states(self.all)])

    async def turn(self, mocks: list[SyntheticUpstream], **knobs: Any) -> None:
        for mock in mocks:
            await asked(mock, "/admin/synth", post(json.dumps(knobs).encode(), "/admin/synth"))

    async def at_rest(self, gateway: Gateway, *, seconds: float = 10.0) -> None:
        """I1 to I4."""
        samples: Any = []
        left, busy = 0, {}
        try:
            async with asyncio.timeout(seconds):
                while True:
                    samples, left = await gateway.metrics(), await self.held()
                    stranded = samples.value("tokenpipe_pd_stranded_total")
                    busy = await loads(gateway, samples, held=stranded > 0)
                    if not busy and left <= stranded and not any(mock.running or mock.waiting for mock in self.all):
                        break
                    await asyncio.sleep(0.05)
        except TimeoutError:
            told = [s for s in samples if s[2] and s[0].startswith("tokenpipe_pd") and s[0].endswith("_total")]
            states = await self.states(self.all)
            raise AssertionError(f"held {left}, {busy}, {told}, {states}, running {[m.running for m in self.all]}") from None
        gateway.check_tidy()


def port_of(mock: SyntheticUpstream) -> int:
    return int(mock.url.rpartition(":")[2])


async def asked(mock: SyntheticUpstream, path: str, request: bytes | None = None) -> dict[str, Any]:
    client = await RawClient.connect(port=port_of(mock))
    try:
        found: dict[str, Any] = (await client.ask(get(path) if request is None else request)).json()
        return found
    finally:
        client.fin()


@contextlib.asynccontextmanager
async def mocks(connector: str, prefills: int = 1, decodes: int = 1, **settings: Any) -> AsyncIterator[Engines]:
    found = Engines(connector)
    async with contextlib.AsyncExitStack() as stack:
        for role, count, into in (("prefill", prefills, found.prefills), ("decode", decodes, found.decodes)):
            for _ in range(count):
                more = {"port": 0, "ttft": 0.01, "itl": 0.002, "tokens": 30, **settings}
                mock = SyntheticUpstream(MockSettings(role=role, connector=connector, **more))
                await mock.start()
                stack.push_async_callback(mock.stop)
                into.append(mock)
        yield found


async def undisturbed(path: str, body: dict[str, Any]) -> str:
    """What one engine alone says."""
    mock = SyntheticUpstream(MockSettings(port=0, ttft=0, itl=0, tokens=30))
    await mock.start()
    try:
        client = await RawClient.connect(port=port_of(mock))
        answer = await client.ask(post(json.dumps(body).encode(), path))
        client.fin()
        return answer.text() if body.get("stream") else said(answer.json())
    finally:
        await mock.stop()


def said(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
