"""The gateway before two real vLLM servers, one that prefills and one that decodes (NIXL): texts are those of one engine alone,
and whoever leaves, in whatever phase, leaves no KV behind.

Opt-in (`make test-vllm`). VLLM_PREFILL_URL and VLLM_DECODE_URL name them, used by nobody else meanwhile, with the model
`tiny`: `../shared/vllm/serve.sh 18100 --role prefill 18150` and `serve.sh 18200 --role decode 18250`. Blocks that nobody
fetches stay in use on the prefill engine until its lease ends (30 s), and are counted by it then; so cache use that has come
to nothing, with that count unmoved, is the proof. A transfer takes 0.2 s to 14 s on two cores, and longer where others use
them too: then start both with KV_LEASE=120 in the environment and say the same here, or leases end before decode has fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import Message
from tests.vllm.test_real import SLOTS, Engine

URLS = tuple(os.environ.get(f"VLLM_{role}_URL", "").rstrip("/") for role in ("PREFILL", "DECODE"))
TOLD = ("tokenpipe_pd_aborts_total", "tokenpipe_pd_release_total", "tokenpipe_pd_stranded_total")
LEASE = float(os.environ.get("KV_LEASE") or 30)  # seconds, of the engines
FREED = LEASE - 5
SLOW = 120.0  # an answer of 32 tokens has taken 50 s where others used the cores, too

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.seconds(600),
    pytest.mark.skipif(not all(URLS), reason="VLLM_PREFILL_URL and VLLM_DECODE_URL are not set: `../shared/vllm/serve.sh`"),
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EACH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
chance = random.Random()


def ask(path: str, stream: bool, tokens: int = 32, length: int = 1000) -> bytes:
    """A prompt that no cache has; the same for both ways it is asked."""
    prompt = f"{chance.getrandbits(64):x} " + "".join(chance.choices("abcdefgh 東京é", k=length))
    said: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    more = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    return s.post({"model": "tiny", **said, **more}, path)


def text(answer: Message) -> str:
    streams = "event-stream" in (answer.get("content-type") or "")
    parts = [json.loads(data) for data in answer.events() if data != "[DONE]"] if streams else [answer.json()]
    found = ""
    for choice in (choice for part in parts for choice in part["choices"]):
        said = choice.get("delta") or choice.get("message")
        found += (said.get("content") if said else choice.get("text")) or ""
    return found


class Pair(NamedTuple):
    prefill: Engine
    decode: Engine
    gateway: Gateway

    async def expired(self) -> float:
        return (await self.prefill.metrics("nixl_num_kv_expired_reqs_total"))[0]

    async def fetched(self) -> float:
        return (await self.decode.metrics("nixl_xfer_time_seconds_count"))[0]

    async def at_rest(self) -> float:
        """Wait until neither engine runs anything or holds a block, and the gateway has nothing under way; how long it took."""
        began, found = time.monotonic(), []
        while True:
            found = [await e.metrics("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc") for e in self[:2]]
            if not any(map(any, found)) and not await self.gateway.metric("tokenpipe_pd_release_inflight"):
                break
            told = [sample for sample in await self.gateway.metrics() if sample[2] and sample[0] in TOLD]
            assert time.monotonic() - began < FREED, f"running, waiting, cache use: {found}; {told}"
            await asyncio.sleep(0.1)
        await self.gateway.idle()
        self.gateway.check_tidy()
        return time.monotonic() - began


@pytest.fixture
async def pair(start_gateway: Callable[..., Awaitable[Gateway]]) -> AsyncIterator[Pair]:
    prefill, decode = map(Engine, URLS)
    listed = [{"url": prefill.url, "role": "prefill"}, {"url": decode.url, "role": "decode"}]
    place = "127.0.0.1:0"
    # An engine that has finished and is told to stop before it has written its answer keeps what nobody knows of: on two busy
    # cores there is much time for that. Nor shows it when decode has fetched for an answer in one piece: here that takes long.
    disaggregation: dict[str, Any] = {"connector": "nixl", "admission_grace": 20, "prefill_grace": 20, "release_cap": 16}
    disaggregation |= {"hold": LEASE, "release_timeout": LEASE}
    config = {"listen": place, "admin": {"listen": place}, "health": {"interval": 60}, "backends": listed}
    found = Pair(prefill, decode, await start_gateway(config=json.dumps({**config, "disaggregation": disaggregation})))
    found.gateway.patience = SLOW  # two engines leave it little of two cores
    await found.at_rest()
    before = await found.expired()
    yield found
    await found.at_rest()
    assert await found.expired() == before
    assert await found.gateway.metric("tokenpipe_pd_stranded_total") == 0


@STREAMED
@EACH
async def test_the_text_of_one_engine(pair: Pair, path: str, stream: bool) -> None:
    """Decode has fetched, as it counts itself; the engine that computed the prompt answers alone with the same."""
    before = await pair.fetched()
    request = ask(path, stream)
    began = time.monotonic()
    answer = await pair.gateway.ask(request, timeout=SLOW)
    took = time.monotonic() - began
    assert answer.status == 200 and answer.complete, answer.body
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    assert answer.get("content-type") == kind
    assert text(answer) == text(await pair.prefill.ask(request)) != ""
    async with asyncio.timeout(SLOW):  # it reports every few seconds
        while await pair.fetched() < before + 1:
            await asyncio.sleep(0.2)
    assert await pair.gateway.metric("tokenpipe_pd_bypass_total") == 0
    print(f"pair: {path}, {'stream' if stream else 'whole'}: {took:.2f} s for 32 tokens, text as of one engine")


async def leavers(pair: Pair, count: int, *, stream: bool) -> list[RawClient]:
    clients = [await pair.gateway.connect() for _ in range(count)]
    for client in clients:
        await client.send(ask(CHAT, stream, 100, 1400))
    return clients


async def after(pair: Pair, phase: str, slowest: float, *, stream: bool) -> dict[str, int]:
    """Where those who have left stood; whoever comes now is served as ever."""
    samples = await pair.gateway.metrics()
    phases = {labels["phase"]: int(v) for n, labels, v in samples if n == "tokenpipe_pd_aborts_total" and v}
    released = {labels["result"]: int(v) for n, labels, v in samples if n == "tokenpipe_pd_release_total" and v}
    kind = "streams" if stream else "whole"
    print(f"pair: left in {phase}, {kind}: {phases}, {released}; at rest after {slowest:.1f} s at most")
    request = ask(CHAT, stream)
    assert text(await pair.gateway.ask(request, timeout=SLOW)) == text(await pair.prefill.ask(request))
    return phases


@STREAMED
async def test_leaving_during_prefill(pair: Pair, stream: bool) -> None:
    """And as it answers: some tenths of a second after the request."""

    slowest = 0.0
    for _ in range(5):
        for _ in range(5):
            (client,) = await leavers(pair, 1, stream=stream)
            await asyncio.sleep(chance.uniform(0, 0.3))
            client.reset()
        slowest = max(slowest, await pair.at_rest())
    assert (await after(pair, "prefill", slowest, stream=stream))["prefill"]


@contextlib.asynccontextmanager
async def busy(engine: Engine) -> AsyncIterator[None]:
    """While it has no place for anybody else: more streams than it runs at once, asked without the gateway. As many again wait,
    for a request that is just being taken up counts as waiting too, and whoever comes then waits however long that takes."""
    clients: list[RawClient] = []
    try:
        for _ in range(2 * SLOTS):
            clients.append(await engine.connect())
            await clients[-1].send(ask(CHAT, True, 1500, 100))
        await engine.wait(running=SLOTS, waiting=SLOTS, timeout=SLOW)
        yield
    finally:
        for client in clients:
            client.reset()


@STREAMED
async def test_leaving_before_the_first_octet(pair: Pair, stream: bool) -> None:
    """Decode has been asked: some leave while it has no place for them, and some while it fetches, if they hit that."""
    slowest = 0.0
    for batch in range(1, 3):
        async with busy(pair.decode):
            clients = await leavers(pair, 5, stream=stream)
            await counted(pair, "tokenpipe_pd_handoff_seconds_count", 5 * batch)
            before = await pair.gateway.metric("tokenpipe_pd_aborts_total")
            for client in clients[:3]:
                client.reset()
            await counted(pair, "tokenpipe_pd_aborts_total", before + 3)
        for client in clients[3:]:
            await asyncio.sleep(chance.uniform(0, 0.2))
            client.reset()
        slowest = max(slowest, await pair.at_rest())
    assert (await after(pair, "wait", slowest, stream=stream))["wait"] >= 6


async def counted(pair: Pair, name: str, count: float) -> None:
    async with asyncio.timeout(SLOW):
        while await pair.gateway.metric(name) < count:
            await asyncio.sleep(0.05)


@EACH
async def test_leaving_mid_stream(pair: Pair, path: str) -> None:
    client = await pair.gateway.connect()
    await client.send(ask(path, True, 700, 800))
    async with asyncio.timeout(SLOW):
        while client.received.count(b"data:") < 3:
            assert await client.more(SLOW)
    client.reset()
    took = await pair.at_rest()
    assert await pair.gateway.metric("tokenpipe_pd_aborts_total", phase="stream") == 1
    print(f"pair: {path}, left mid-stream: at rest after {took:.2f} s")


async def test_ten_leave_at_once(pair: Pair) -> None:
    """As prefill runs ten: some computed, some queued, some in hand."""
    clients = await leavers(pair, 10, stream=True)
    await asyncio.sleep(chance.uniform(0.1, 0.6))
    for client in clients:
        client.reset()
    took = await pair.at_rest()
    samples = await pair.gateway.metrics()
    with contextlib.suppress(KeyError):
        print({labels["phase"]: v for n, labels, v in samples if n == "tokenpipe_pd_aborts_total" and v}, f"{took:.1f} s")
