"""The end of the process, and of a configuration: what is under way is finished or visibly cut, the rest refused."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
END = b"".join(map(s.chunk, s.FINISHED)) + s.LAST


def chat(request_id: str, **members: Any) -> bytes:
    return s.post({**s.CHAT, **members}, fields=[("X-Request-Id", request_id)])


def lasting(seconds: float) -> s.Script:
    """An event each 50 ms for so long, then the proper end."""

    async def script(wire: HttpWire, request: Message) -> None:
        await s.stream(*[s.delta("a")] * max(int(seconds / 0.05), 1), *s.FINISHED, gap=0.05)(wire, request)

    return script


async def asked(gateway: Gateway, request: bytes) -> RawClient:
    client = await gateway.connect()
    await client.send(request)
    return client


class TestDrain:
    async def test_idle(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """Nothing under way: it ends at once, status 0, and idle connections get their FIN."""
        gateway = await start_gateway(config={}, backends=[upstream.url])
        idle = [await gateway.connect() for _ in range(3)]
        await idle[0].ask()
        half = await asked(gateway, s.post()[:30])
        began = time.monotonic()
        gateway.signal(signal.SIGTERM)
        ended = await gateway.stopped(timeout=5)
        assert ended - began < 1.5
        for client in (*idle, half):
            await client.wait_closed(1)
            client.fin()
        assert idle[1].ended == "fin"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    async def test_streams_that_end_in_time(self, start_gateway: Start, upstream: RawUpstream, number: int) -> None:
        """They come to their proper end, and the process ends soon after the last of them."""
        gateway = await start_gateway(config={"timeouts": {"drain": 10}}, backends=[upstream.url])
        clients = []
        for seconds in (0.3, 0.6, 1.0):
            upstream.script = lasting(seconds)
            clients.append(await asked(gateway, chat(f"s-{seconds}")))
            await upstream.wait_requests(len(clients))
        began = time.monotonic()
        gateway.signal(number)
        answers = await asyncio.gather(*(client.read_response() for client in clients))
        assert all(a.complete and a.body.endswith(s.DONE) for a in answers)
        ended = await gateway.stopped(timeout=5)
        assert 0.6 < ended - began < 2.5
        for client in clients:
            await client.wait_closed(1)
            client.fin()
        assert {e["outcome"] for e in gateway.access_log()} == {"complete"}

    async def test_streams_that_do_not(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """Silent ones and endless ones are cut at the limit, visibly; what waits for its head gets a 503."""
        gateway = await start_gateway(config={"timeouts": {"drain": 0.5}}, backends=[upstream.url])
        upstream.script = silent = s.Held(s.SSE_HEAD, s.chunk(s.delta("a")))
        one = await asked(gateway, chat("silent"))
        wire = await silent.wire()
        upstream.script = lasting(20)
        two = await asked(gateway, chat("endless"))
        await upstream.wait_requests(2)
        upstream.script = waiting = s.Held()
        three = await asked(gateway, chat("waiting"))
        await waiting.wire()
        began = time.monotonic()
        gateway.signal(signal.SIGTERM)
        for client in (one, two):
            answer = await client.read_response()
            assert not answer.complete
            assert s.DONE not in answer.body
        answer = await three.read_response()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "draining")
        ended = await gateway.stopped(timeout=5)
        assert 0.4 < ended - began < 2.5
        assert await wire.wait_closed(1) - began < 1.0
        phases = {e["request_id"]: (e["outcome"], e["phase"]) for e in gateway.access_log()}
        assert phases == {"silent": ("draining", "stream"), "endless": ("draining", "stream"),
                          "waiting": ("draining", "wait")}  # fmt: skip
        for client in (one, two, three):
            client.fin()

    async def test_zero(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """`drain: 0` cuts at once."""
        gateway = await start_gateway(config={"timeouts": {"drain": 0}}, backends=[upstream.url])
        upstream.script = held = s.Held(s.SSE_HEAD, s.chunk(s.delta("a")))
        client = await asked(gateway, chat("cut"))
        await held.wire()
        began = time.monotonic()
        gateway.signal(signal.SIGTERM)
        assert not (await client.read_response()).complete
        assert await gateway.stopped(timeout=5) - began < 1.5
        client.fin()

    async def test_a_second_signal(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """It skips the wait: cut now, status 0 all the same."""
        gateway = await start_gateway(config={"timeouts": {"drain": 60}}, backends=[upstream.url])
        upstream.script = held = s.Held(s.SSE_HEAD, s.chunk(s.delta("a")))
        client = await asked(gateway, chat("cut"))
        await held.wire()
        gateway.signal(signal.SIGTERM)
        await until(lambda: "stopping" in gateway.stderr(), "the first signal")
        began = time.monotonic()
        gateway.signal(signal.SIGTERM)
        answer = await client.read_response()
        assert not answer.complete
        assert await gateway.stopped(timeout=5) - began < 1.5
        (entry,) = gateway.access_log()
        assert entry["outcome"] == "draining"
        client.fin()

    async def test_readiness_fails_at_once(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """While streams go on: readyz 503, livez 200, new connections refused, requests on open ones 503 and close."""
        gateway = await start_gateway(config={"timeouts": {"drain": 20}}, backends=[upstream.url])
        upstream.script = held = s.Held(s.SSE_HEAD)
        client = await asked(gateway, chat("held"))
        wire = await held.wire()
        begun = await asked(gateway, chat("begun")[:60])
        body = await asked(gateway, chat("body")[:-10])
        async with asyncio.timeout(5):
            while len((await gateway.admin(s.get("/-/streams"))).json()) < 2:
                await asyncio.sleep(0.01)
        gateway.signal(signal.SIGTERM)
        await until(lambda: "stopping" in gateway.stderr(), "the signal")
        ready = await gateway.admin(s.get("/readyz"))
        assert (ready.status, ready.body.strip()) == (503, b"draining")
        assert (await gateway.admin(s.get("/livez"))).status == 200
        assert await gateway.metric("tokenpipe_requests_in_flight") >= 1
        with pytest.raises(ConnectionRefusedError):
            await gateway.connect()
        await begun.send(chat("begun")[60:])
        answer = await begun.read_response()
        assert (answer.status, answer.get("x-gateway-error"), answer.get("connection")) == (503, "draining", "close")
        assert int(answer.get("retry-after") or 0) >= 1
        # accepted before the signal: it is served to its end
        upstream.script = s.stream(s.delta("b"), *s.FINISHED)
        await body.send(chat("body")[-10:])
        answer = await body.read_response()
        assert answer.complete
        assert answer.get("connection") == "close"
        await wire.send(s.chunk(s.delta("a")) + END)
        assert (await client.read_response()).complete
        await gateway.stopped(timeout=5)
        for one in (client, begun, body):
            one.fin()

    async def test_queued(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """Who waits in the queue is served while there is time, and refused properly when there is none left."""
        config = {"timeouts": {"drain": 1.0}, "limits": {"in_flight": 1}}
        gateway = await start_gateway(config=config, backends=[upstream.url])
        closing = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked"), ("connection", "close")]
        upstream.script = held = s.Held(s.head(200, closing))
        holder = await asked(gateway, chat("holder"))
        wire = await held.wire()
        first, second = await asked(gateway, chat("first")), await asked(gateway, chat("second"))
        async with asyncio.timeout(5):
            while await gateway.metric("tokenpipe_queue_depth") < 2:
                await asyncio.sleep(0.01)
        gateway.signal(signal.SIGTERM)
        await until(lambda: "stopping" in gateway.stderr(), "the signal")
        upstream.script = s.Held(s.SSE_HEAD)
        await wire.send(s.chunk(s.delta("a")) + END)
        wire.fin()
        assert (await holder.read_response()).complete
        await upstream.wait_requests(2)
        answers = {}
        for name, client in (("first", first), ("second", second)):
            answers[name] = await client.read_response()
        served = [a for a in answers.values() if a.status == 200]
        refused = [a for a in answers.values() if a.status == 503]
        assert (len(served), len(refused)) == (1, 1)
        assert not served[0].complete
        assert refused[0].get("x-gateway-error") == "draining"
        await gateway.stopped(timeout=5)
        for client in (holder, first, second):
            client.fin()

    async def test_keep_alive_answers_say_close(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """An answer whose head goes out after the signal says that its connection ends."""
        gateway = await start_gateway(config={"timeouts": {"drain": 10}}, backends=[upstream.url])
        upstream.script = held = s.Held()
        client = await asked(gateway, chat("late"))
        wire = await held.wire()
        gateway.signal(signal.SIGTERM)
        await until(lambda: "stopping" in gateway.stderr(), "the signal")
        await wire.send(s.SSE_HEAD + s.chunk(s.delta("a")) + END)
        answer = await client.read_response()
        assert (answer.complete, answer.get("connection")) == (True, "close")
        await client.wait_closed(2)
        await gateway.stopped(timeout=5)
        client.fin()

    async def test_the_last_octets_of_a_slow_reader(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """An answer that its backend has finished is still delivered whole to a client that takes its time."""
        gateway = await start_gateway(config={"timeouts": {"drain": 20}}, backends=[upstream.url])
        body = b"b" * 1_000_000
        upstream.script = s.reply(200, body)
        client = await gateway.connect(receive_buffer=4096, rate=1_000_000)
        await client.send(chat("slow"))
        await upstream.wait_requests()
        gateway.signal(signal.SIGTERM)
        answer = await client.read_response(timeout=15)
        assert answer.complete
        assert answer.body == body
        await gateway.stopped(timeout=10)
        client.fin()

    async def test_over_tls(self, start_gateway: Start, upstream: RawUpstream, certificates: Certificates) -> None:
        """The same over TLS: a whole stream, a cut one, and status 0."""
        tls = {"certificate": str(certificates.certificate), "key": str(certificates.key)}
        gateway = await start_gateway(config={"tls": tls, "timeouts": {"drain": 0.8}}, backends=[upstream.url])
        context = certificates.client_context()
        clients = [await gateway.connect(tls=context) for _ in range(3)]
        upstream.script = lasting(0.3)
        await clients[0].send(chat("short"))
        await upstream.wait_requests(1)
        upstream.script = s.Held(s.SSE_HEAD)
        await clients[1].send(chat("silent"))
        await upstream.wait_requests(2)
        gateway.signal(signal.SIGTERM)
        assert (await clients[0].read_response()).complete
        assert not (await clients[1].read_response()).complete
        await gateway.stopped(timeout=6)
        for client in clients:
            client.fin()

    async def test_no_request_is_lost_on_the_way(self, start_gateway: Start, upstream: RawUpstream) -> None:
        """Under load: every request sent on an accepted connection is answered, whole or with 503, or never begun."""
        gateway = await start_gateway(config={"timeouts": {"drain": 10}}, backends=[upstream.url])
        upstream.script = s.stream(s.delta("a"), *s.FINISHED)
        cut = []

        async def load() -> int:
            count = 0
            while True:
                try:
                    client = await gateway.connect()
                except (ConnectionRefusedError, ConnectionResetError):
                    return count
                try:
                    await client.send(s.post())
                    head = await client.read_response_head()
                    answer = await client.read_response_body(head)
                    if not answer.complete or answer.status not in (200, 503):
                        cut.append(answer)
                    count += 1
                except Exception as error:
                    cut.append(error)
                finally:
                    client.fin()

        tasks = [asyncio.create_task(load()) for _ in range(8)]
        await upstream.wait_requests(50)
        gateway.signal(signal.SIGTERM)
        counts = await asyncio.gather(*tasks)
        await gateway.stopped(timeout=8)
        print(f"{sum(counts)} requests, {len(cut)} without an answer: {cut[:3]}")
        assert not cut


def written(gateway: Gateway, config: Any) -> None:
    assert gateway.config_path
    gateway.config_path.write_text(config if isinstance(config, str) else json.dumps(config))


async def reloaded(gateway: Gateway, how: str, result: str) -> str:
    """Ask for a reload, and wait until it has been counted; what was said about it."""
    before = await gateway.metric("tokenpipe_config_reloads_total", result=result)
    if how == "signal":
        gateway.signal(signal.SIGHUP)
        async with asyncio.timeout(5):
            while await gateway.metric("tokenpipe_config_reloads_total", result=result) == before:
                await asyncio.sleep(0.01)
        return gateway.stderr()
    answer = await gateway.admin(s.get("/-/reload", method="POST"))
    assert answer.status == (200 if result == "success" else 400), answer.body
    assert await gateway.metric("tokenpipe_config_reloads_total", result=result) == before + 1
    return answer.body.decode()


WRONG = ["", "listen: [", "timeouts: {idel: 5}", '{"backends": []}', '{"backends": [{"url": "ftp://x"}]}',
         "timeouts: {idle: -1}", "balance: fastest", "workers: 2", "listen: 127.0.0.1:1"]  # fmt: skip


@pytest.mark.parametrize("how", ["signal", "post"])
class TestReload:
    async def test_takes_effect_and_touches_no_stream(self, start_gateway: Start, upstream: RawUpstream, how: str) -> None:
        """New requests live by the new rules; a stream that runs knows nothing of it."""
        base = {"backends": [{"url": upstream.url}], "timeouts": {"idle": 5}}
        gateway = await start_gateway(config=base)
        upstream.script = held = s.Held(s.SSE_HEAD, s.chunk(s.delta("a")))
        client = await asked(gateway, chat("runs"))
        wire = await held.wire()
        rules = {"timeouts": {"idle": 0.2}, "limits": {"request_body": 50}, "paths": {"deny": ["/v1/x"]}}
        written(gateway, {**base, **rules})
        await reloaded(gateway, how, "success")
        assert (await gateway.ask(s.get("/v1/x"))).status == 404
        assert (await gateway.ask()).get("x-gateway-error") == "body_too_large"
        await asyncio.sleep(0.5)
        await wire.send(s.chunk(s.delta("b")) + END)
        assert (await client.read_response()).complete
        client.fin()

    async def test_a_wrong_one_changes_nothing(self, start_gateway: Start, upstream: RawUpstream, how: str) -> None:
        """It is refused with its reason, the old one goes on, and the next right one is taken."""
        base = {"backends": [{"url": upstream.url}], "paths": {"deny": ["/v1/x"]}}
        gateway = await start_gateway(config=base)
        before = (await gateway.admin(s.get("/-/config"))).body
        for wrong in WRONG:
            written(gateway, wrong)
            said = await reloaded(gateway, how, "failure")
            assert len(said) > 20
            assert (await gateway.admin(s.get("/-/config"))).body == before, wrong
            assert (await gateway.ask()).status == 200
            assert (await gateway.ask(s.get("/v1/x"))).status == 404
        written(gateway, {**base, "paths": {}})
        await reloaded(gateway, how, "success")
        assert (await gateway.ask(s.get("/v1/x"))).status == 200

    async def test_half_of_a_wrong_one_is_not_in_force(
        self, start_gateway: Start, upstream: RawUpstream, how: str, tmp_path: Path
    ) -> None:
        """A fault that shows only when the second backend is made leaves the first one as it was."""
        broken = tmp_path / "ca.pem"
        broken.write_text("no certificate")
        gateway = await start_gateway(config={"backends": [{"url": upstream.url, "name": "a"}]})
        one = {"url": upstream.url, "name": "a", "max_in_flight": 1, "weight": 7}
        other = {"url": "https://127.0.0.1:1", "tls": {"ca": str(broken)}}
        written(gateway, {"backends": [one, other]})
        await reloaded(gateway, how, "failure")
        (backend,) = (await gateway.admin(s.get("/-/backends"))).json()
        assert (backend["max_in_flight"], backend["weight"]) == (None, 1)

    async def test_a_lower_and_a_higher_limit(self, start_gateway: Start, upstream: RawUpstream, how: str) -> None:
        """Who waits in the queue is let in when the limit is raised."""
        base = {"backends": [{"url": upstream.url}]}
        gateway = await start_gateway(config={**base, "limits": {"in_flight": 1}})
        upstream.script = held = s.Held(s.SSE_HEAD)
        clients = [await asked(gateway, chat(f"l-{n}")) for n in range(2)]
        await held.wire()
        written(gateway, {**base, "limits": {"in_flight": 2}})
        await reloaded(gateway, how, "success")
        await held.wire(1)
        for client in clients:
            client.reset()
