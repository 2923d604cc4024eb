"""Several backends behind one gateway: who takes what, what one that fails does to the others, and what is merged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream, listening_socket, probe_status

Start = Callable[..., Awaitable[Gateway]]
FAST = {"interval": 0.1, "timeout": 0.3, "fail": 2, "pass": 2, "slow_start": 0}
SLOW = {"interval": 60, "slow_start": 0}


@contextlib.asynccontextmanager
async def fleet(
    count: int, script: s.Script | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[RawUpstream]]:
    backends = [RawUpstream(script, models=(f"m{number}", "m")) for number in range(count)]
    for backend in backends:
        await backend.start(tls=tls)
    try:
        yield backends
    finally:
        for backend in backends:
            await backend.stop()


@contextlib.contextmanager
def refusing() -> Any:
    """The URL of a port on which nobody listens, and nobody else will."""
    with listening_socket() as taken:
        address = taken.getsockname()
        taken.close()
        yield f"http://127.0.0.1:{address[1]}"


def urls(backends: list[RawUpstream]) -> list[str]:
    return [backend.url for backend in backends]


def served(backends: list[RawUpstream]) -> list[int]:
    return [len(backend.requests) for backend in backends]


def chat(request_id: str) -> bytes:
    return s.post(fields=[("X-Request-Id", request_id)])


async def states(gateway: Gateway) -> list[dict[str, Any]]:
    found = (await gateway.admin(s.get("/-/backends"))).json()
    assert isinstance(found, list)
    return found


async def reached(gateway: Gateway, count: int, **wanted: str | int) -> None:
    """Wait until so many backends say this of themselves."""
    async with asyncio.timeout(5):
        while sum(wanted.items() <= b.items() for b in await states(gateway)) != count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("balance", "margin"), [("least_loaded", 0), ("round_robin", 0), ("power_of_two", 20)])
async def test_short_requests_are_spread_evenly(start_gateway: Start, balance: str, margin: int) -> None:
    """400 sequential requests on 4 backends: 25 % each, or within 5 points where chance has a part in it."""
    async with fleet(4) as backends:
        gateway = await start_gateway(config={"balance": balance}, backends=urls(backends))
        client = await gateway.connect()
        for _ in range(400):
            assert (await client.ask()).status == 200
        client.fin()
        assert all(abs(count - 100) <= margin for count in served(backends)), served(backends)


async def test_least_loaded_avoids_the_busy(start_gateway: Start) -> None:
    """Streams that go on count: the next requests go where there are fewer."""
    async with fleet(2) as backends:
        gateway = await start_gateway(config={}, backends=urls(backends))
        held = s.Held(s.SSE_HEAD)
        for backend in backends:
            backend.script = held
        clients = [await gateway.connect() for _ in range(6)]
        for number, client in enumerate(clients):
            await client.send(chat(f"held-{number}"))
            await held.wire(number)
            assert abs(len(backends[0].requests) - len(backends[1].requests)) <= 1
        for client in clients:
            client.fin()


async def test_one_refuses(start_gateway: Start) -> None:
    """A POST whose connection was refused goes elsewhere, each of them exactly once, and no client learns of it."""
    async with fleet(2) as backends:
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        await reached(gateway, 2, health="up")
        backends[0].close_listener()
        answers = await asyncio.gather(*(gateway.ask(chat(f"r-{n}")) for n in range(40)))
        assert {a.status for a in answers} == {200}
        ids = Counter(r.get("x-request-id") for r in backends[1].requests)
        assert ids == {f"r-{n}": 1 for n in range(40)}
        samples = await gateway.metrics()
        retried = samples.value("tokenpipe_retries_total", reason="upstream_connect")
        assert retried >= 1
        entries = await gateway.logged(20, outcome="complete")
        assert sum(e["attempts"] - 1 for e in entries) == retried
        # five failures, and it is not asked any more
        assert samples.value("tokenpipe_backend_failures_total") >= 5
        await reached(gateway, 1, breaker="open")


async def test_one_has_refused_from_the_start(start_gateway: Start) -> None:
    """It is not asked while another one serves: its first probe says enough."""
    async with fleet(1) as backends:
        with refusing() as dead:
            gateway = await start_gateway(config={"health": SLOW}, backends=[dead, *urls(backends)])
            answers = await asyncio.gather(*(gateway.ask(chat(f"r-{n}")) for n in range(40)))
            assert {a.status for a in answers} == {200}
            assert len(backends[0].requests) == 40


async def test_all_refuse(start_gateway: Start) -> None:
    """502 upstream_connect, with as many attempts as there are, and the breakers never leave nobody to ask."""
    with refusing() as one, refusing() as other:
        gateway = await start_gateway(config={"health": SLOW}, backends=[one, other])
        for number in range(16):
            answer = await gateway.ask(chat(f"n-{number}"))
            assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_connect"), number
            (entry,) = await gateway.logged(request_id=f"n-{number}")
            assert entry["outcome"] == "upstream_connect"
            assert entry["attempts"] <= 2


async def test_the_failure_that_was_is_the_one_that_is_told(start_gateway: Start) -> None:
    """With the only other backend ejected, a refused connection is 502 upstream_connect: nobody is at a limit."""
    async with fleet(1, s.vanish) as backends:
        with refusing() as dead:
            config = {"health": SLOW, "breaker": {"failures": 1, "open": 60}, "balance": "round_robin"}
            gateway = await start_gateway(config=config, backends=[*urls(backends), dead])
            codes = [(await gateway.ask(chat(f"t-{n}"))).get("x-gateway-error") for n in range(6)]
            assert set(codes) <= {"upstream_reset", "upstream_connect"}, codes


@pytest.mark.parametrize("commit", ["head", "first_event"])
@pytest.mark.parametrize(
    ("script", "code"),
    [
        (s.vanish, "upstream_reset"),
        (s.raw(b"what?\r\n", then="fin"), "upstream_malformed"),
        (s.raw(s.head(200, [("x-fill", "x" * 70_000)])), "upstream_malformed"),
        (s.raw(b"HTTP/1.1 200 OK\r\nbad field\r\n\r\n"), "upstream_malformed"),
        (s.Held(), "timeout_first_byte"),
    ],
    ids=["closed", "no http", "large head", "bad head", "silent"],
)
async def test_errors_name_the_backend(start_gateway: Start, script: s.Script, code: str, commit: str) -> None:
    """Whose fault it was: with a fleet "the backend" is nobody."""
    async with fleet(1, script) as backends:
        named = [{"url": backends[0].url, "name": "llama-7"}]
        config = {"backends": named, "timeouts": {"first_byte": 0.3}, "health": SLOW, "commit": commit}
        gateway = await start_gateway(config=config)
        answer = await gateway.ask(chat("e-1"))
        assert answer.get("x-gateway-error") == code
        assert "the backend llama-7 " in answer.json()["error"]["message"]


async def test_one_hangs(start_gateway: Start) -> None:
    """It costs its own requests a 504, then none: it is taken out, and the other one is never slow."""
    async with fleet(2) as backends:
        hangs, _ = backends
        hangs.script = s.Held()
        config = {"timeouts": {"first_byte": 0.3}, "health": SLOW, "breaker": {"failures": 3, "open": 60}}
        gateway = await start_gateway(config=config, backends=urls(backends))
        answers = await asyncio.gather(*(gateway.ask(chat(f"h-{n}")) for n in range(20)))
        assert Counter(a.status for a in answers).keys() <= {200, 504}
        await reached(gateway, 1, breaker="open")
        began = time.monotonic()
        answers = await asyncio.gather(*(gateway.ask() for _ in range(20)))
        assert {a.status for a in answers} == {200}
        assert time.monotonic() - began < 0.3
        ids = Counter(r.get("x-request-id") for b in backends for r in b.requests)
        assert max(ids.values()) == 1  # what it had read was not asked of anybody else


async def test_breaker_opens_tries_and_closes(start_gateway: Start) -> None:
    """Out after its failures, one trial when its time has come, and in again when that went well."""
    async with fleet(2) as backends:
        ill, _ = backends
        ill.script = s.vanish
        config = {"health": SLOW, "breaker": {"failures": 2, "open": 0.5, "window": 30}, "balance": "round_robin"}
        gateway = await start_gateway(config=config, backends=urls(backends))
        statuses = [(await gateway.ask()).status for _ in range(4)]
        assert sorted(statuses) == [200, 200, 502, 502]
        assert [b["breaker"] for b in await states(gateway)] == ["open", "closed"]
        before = len(ill.requests)
        assert {(await gateway.ask()).status for _ in range(6)} == {200}
        assert len(ill.requests) == before
        await reached(gateway, 1, state="trial", breaker="half_open")  # said by time alone: nothing has been asked
        assert await gateway.metric("tokenpipe_backend_state", state="trial") == 1
        assert await gateway.metric("tokenpipe_backend_state", state="ejected") == 0
        statuses = [(await gateway.ask()).status for _ in range(6)]
        assert sorted(statuses) == [200] * 5 + [502]  # the one trial
        ill.script = s.reply()
        await asyncio.sleep(0.55)
        before = len(ill.requests)
        assert {(await gateway.ask()).status for _ in range(6)} == {200}
        assert len(ill.requests) - before >= 2
        await reached(gateway, 2, breaker="closed")
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_backend_failures_total", reason="upstream_reset") == 3


@pytest.mark.parametrize("status", [400, 429, 500, 502, 503])
async def test_statuses_are_no_failures(start_gateway: Start, status: int) -> None:
    """What a backend chose to say passes, is not tried elsewhere, and opens nothing."""
    async with fleet(2, s.reply(status, b"{}", [s.JSON_TYPE, ("retry-after", "7")])) as backends:
        config = {"health": SLOW, "breaker": {"failures": 1}, "retry": {"statuses": []}, "balance": "round_robin"}
        gateway = await start_gateway(config=config, backends=urls(backends))
        for _ in range(6):
            answer = await gateway.ask()
            assert (answer.status, answer.get("retry-after")) == (status, "7")
        assert sum(served(backends)) == 6
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}


async def test_clients_that_leave_are_no_failures(start_gateway: Start) -> None:
    """However many leave, their backend stays."""
    async with fleet(2, s.Held(s.SSE_HEAD)) as backends:
        gateway = await start_gateway(config={"health": SLOW, "breaker": {"failures": 1}}, backends=urls(backends))
        for _ in range(6):
            client = await gateway.connect()
            await client.send(s.post())
            await client.read_response_head()
            client.reset()
        await gateway.idle()
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}


async def test_health(start_gateway: Start) -> None:
    """Down after so many ill probes, whatever ill means; up again after so many well ones; no request is lost by it."""

    async def silent(wire: HttpWire, request: Message) -> None:
        await wire.wait_closed()

    async with fleet(2) as backends:
        ill, _ = backends
        gateway = await start_gateway(config={"health": FAST}, backends=urls(backends))
        await reached(gateway, 2, state="up")
        probe = ill.probes["/health"]
        for bad in (probe_status(500), probe_status(302), silent, s.vanish):
            ill.probes["/health"] = bad
            await reached(gateway, 1, state="down")
            before = len(ill.requests)
            assert {(await gateway.ask()).status for _ in range(4)} == {200}
            assert len(ill.requests) == before
            assert await gateway.metric("tokenpipe_backend_up") == 1
            ill.probes["/health"] = probe
            await reached(gateway, 2, state="up")


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28"])
async def test_probes_end_in_the_midst_of_a_handshake(start_gateway: Start, reply: bytes) -> None:
    """A backend that takes TCP and not TLS is down, and nothing is left of the probes that gave up: no socket, no traceback."""

    async def no_tls(wire: HttpWire) -> None:
        await wire.receive()
        if reply:
            await wire.send(reply)
        await wire.wait_closed()

    async with fleet(1) as (backend,):
        backend.on_connect = no_tls
        health = FAST | {"timeout": 0.05, "interval": 0.05}
        config = {"backends": [{"url": backend.url.replace("http:", "https:"), "tls": {"verify": False}}], "health": health}
        gateway = await start_gateway(config=config)
        await until(lambda: len(backend.connections) > 20, "probes")
        await reached(gateway, 1, state="down")
        assert len(backend.open_connections) <= 1
        gateway.check_tidy()


async def test_probes_are_cut_by_the_end(start_gateway: Start, certificates: Certificates) -> None:
    """Stopped at any step of a probe over TLS, the gateway leaves nothing open."""
    async with fleet(1, tls=certificates.server_context()) as (backend,):
        config = {
            "backends": [{"url": backend.url, "tls": {"ca": str(certificates.ca)}}],
            "health": FAST | {"interval": 0.05},
            "discovery": {"interval": 0.05},
        }
        for number in range(12):
            gateway = await start_gateway(config=config)
            await asyncio.sleep(number * 0.004)
            gateway.signal(signal.SIGTERM)
            await gateway.stopped()


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_trial_that_was_none_is_given_to_another(start_gateway: Start, method: str) -> None:
    """A half-open backend that was picked for a second attempt which was not made, or that proved only stale, is tried
    again with the next request."""
    async with fleet(2, s.reply()) as backends:
        one, other = backends
        breaker = {"failures": 2, "window": 30, "open": 0.3}
        gateway = await start_gateway(
            config={"health": SLOW, "breaker": breaker, "balance": "round_robin"}, backends=urls(backends)
        )
        other.script = s.vanish
        for _ in range(8):
            await gateway.ask()
        await reached(gateway, 1, breaker="closed")
        other.script = s.reply()
        await asyncio.sleep(0.4)
        one.script = s.vanish
        await gateway.ask(s.post() if method == "POST" else s.get("/v1/models/m"))
        one.script = s.reply()
        count = len(other.requests)
        async with asyncio.timeout(5):
            while len(other.requests) < count + 3:
                await gateway.ask()
        await reached(gateway, 2, breaker="closed")


@pytest.mark.parametrize("how", ["ill", "asleep", "no metrics", "hangs"])
async def test_probes_leave_nothing_open(start_gateway: Start, how: str) -> None:
    """A connection is kept for the page that follows; where none does, it is closed, whatever `pool.idle` says."""
    async with fleet(2) as backends:
        probes = backends[0].probes
        if how == "asleep":
            probes["/metrics"] = s.reply(200, b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n', ())
        elif how == "ill":
            probes["/health"] = probe_status(503)
        elif how == "no metrics":
            probes["/metrics"] = probe_status(404)
        else:
            probes["/v1/models"] = s.Held()
        config = {"health": FAST | {"interval": 0.05}, "pool": {"idle": 60}}
        gateway = await start_gateway(config=config, backends=urls(backends))
        await until(lambda: all(b.probed.count("/health") > 8 for b in backends), "some rounds")
        assert all(len(b.open_connections) <= 2 for b in backends), [b.open_connections for b in backends]
        gateway.stop()


async def test_what_probes_leave_open_is_closed(start_gateway: Start) -> None:
    """A connection that an ill backend's probe has left for others goes with the backend, and with the gateway."""
    async with fleet(3) as backends:
        for backend in backends[:2]:
            backend.probes["/health"] = probe_status(503)
        gateway = await start_gateway(config={"health": FAST, "pool": {"idle": 60}}, backends=urls(backends))
        await reached(gateway, 2, health="down")
        assert gateway.config_path
        config = json.loads(gateway.config_path.read_text())
        gateway.config_path.write_text(json.dumps({**config, "backends": config["backends"][1:]}))
        assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 200
        await until(lambda: not backends[0].open_connections, "no connection to the one that is gone")
        gateway.stop()


async def test_all_down(start_gateway: Start) -> None:
    """503 no_backend with Retry-After, on every path; /health and readyz say so; and it all comes back."""
    async with fleet(2) as backends:
        gateway = await start_gateway(config={"health": FAST}, backends=urls(backends))
        for backend in backends:
            backend.probes["/health"] = probe_status(503)
        await reached(gateway, 2, state="down")
        for request in (chat("down"), s.get("/v1/models"), s.get("/version")):
            answer = await gateway.ask(request)
            assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend"), request[:20]
            assert answer.get("retry-after")
        assert (await gateway.ask(s.get("/health"))).status == 503
        assert (await gateway.admin(s.get("/readyz"))).status == 503
        assert (await gateway.admin(s.get("/livez"))).status == 200
        for backend in backends:
            backend.probes["/health"] = s.reply()
        await reached(gateway, 2, state="up")
        answer = await gateway.ask(s.get("/health"))
        assert (answer.status, answer.body) == (200, b"")
        assert (await gateway.ask()).status == 200


async def test_a_stream_outlives_its_backends_health(start_gateway: Start) -> None:
    """A backend that is taken out keeps what it is doing."""
    async with fleet(1) as backends:
        (backend,) = backends
        gateway = await start_gateway(config={"health": FAST}, backends=urls(backends))
        backend.script = held = s.Held(s.SSE_HEAD)
        client = await gateway.connect()
        await client.send(s.post())
        wire = await held.wire()
        backend.probes["/health"] = probe_status(500)
        await reached(gateway, 1, state="down")
        await wire.send(s.chunk(s.delta("a")) + b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
        assert (await client.read_response()).complete
        client.fin()


async def test_max_in_flight_queues(start_gateway: Start) -> None:
    """More requests than places: they wait their turn and are all served; no backend has more than its limit."""
    most, now = 0, 0

    async def script(wire: HttpWire, request: Message) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.03)
        now -= 1
        await s.reply()(wire, request)

    async with fleet(1, script) as backends:
        config = {"backends": [{"url": backends[0].url, "max_in_flight": 2}]}
        gateway = await start_gateway(config=config)
        answers = await asyncio.gather(*(gateway.ask(chat(f"q-{n}")) for n in range(20)))
        assert Counter((a.status, a.get("x-gateway-error")) for a in answers) == {(200, None): 20}
        assert most == 2


async def test_max_in_flight_of_several(start_gateway: Start) -> None:
    """Each backend has its own limit, and the places of all of them are used."""
    held = s.Held(s.SSE_HEAD)
    async with fleet(2, held) as backends:
        listed = [{"url": b.url, "max_in_flight": n + 1} for n, b in enumerate(backends)]
        gateway = await start_gateway(config={"backends": listed, "timeouts": {"queue": 0.3}})
        clients = [await gateway.connect() for _ in range(4)]
        for number, client in enumerate(clients):
            await client.send(chat(f"l-{number}"))
        await held.wire(2)
        assert served(backends) == [1, 2]
        late = [c for c in clients if c.received_bytes == 0]
        answers = [await asyncio.wait_for(c.read_response_head(), 3) for c in late]
        assert sorted(a.status for a in answers) == [200, 200, 200, 503]
        for client in clients:
            client.reset()


async def test_a_stale_get_is_tried_once_more(start_gateway: Start) -> None:
    """On a kept connection that closes instead of answering: a GET on a fresh one, a POST never; each read once."""

    async def once(wire: HttpWire, request: Message) -> None:
        """Answer one request; end at the next one, with it read."""
        if wire.received.count(b"HTTP/1.1\r\n") == 1:
            await s.reply()(wire, request)
        else:
            wire.reset()

    async with fleet(1, once) as backends:
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
        assert (await gateway.ask()).status == 200
        assert (await gateway.ask(s.get("/v1/x", [("X-Request-Id", "get")]))).status == 200
        (entry,) = await gateway.logged(request_id="get")
        assert (entry["attempts"], entry["outcome"]) == (2, "complete")
        answer = await gateway.ask(chat("post"))
        assert (answer.status, answer.get("x-gateway-error")) == (502, "stale_connection")
        ids = [r.get("x-request-id") for r in backends[0].requests]
        assert (ids.count("get"), ids.count("post")) == (2, 1)
        assert {b["breaker"] for b in await states(gateway)} == {"closed"}


async def test_a_stale_connection_leaves_the_second_try(start_gateway: Start) -> None:
    """The backend dies as it reads a request on a kept connection: that one is sent to it again, in vain, and then elsewhere,
    also where there are two attempts in all."""
    dying: RawUpstream

    async def dies(wire: HttpWire, request: Message) -> None:
        if wire.received.count(b"HTTP/1.1\r\n") == 1:
            await s.reply()(wire, request)
        else:
            dying.close_listener()
            wire.reset()

    async with fleet(1, dies) as (dying,), fleet(1) as (well,):
        config = {"health": SLOW, "balance": "round_robin", "retry": {"attempts": 2, "replay_stale": True}}
        gateway = await start_gateway(config=config, backends=urls([dying, well]))
        for number in range(4):
            assert (await gateway.ask(chat(f"r-{number}"))).status == 200
        entries = await gateway.logged(4)
        assert max(entry["attempts"] for entry in entries) == 3
        assert served([dying, well]) == [2, 3]


class TestModels:
    async def test_merged(self, start_gateway: Start) -> None:
        """Each model once, with the metadata that its backend gave it."""
        async with fleet(3) as backends:
            gateway = await start_gateway(config={"health": FAST}, backends=urls(backends))
            await until(lambda: all("/v1/models" in b.probed for b in backends), "the model lists")
            await asyncio.sleep(0.05)
            answer = await gateway.ask(s.get("/v1/models"))
            assert (answer.status, answer.get("content-type")) == (200, "application/json")
            listed = answer.json()
            assert listed["object"] == "list"
            assert sorted(m["id"] for m in listed["data"]) == ["m", "m0", "m1", "m2"]
            assert all(m["max_model_len"] == 4096 for m in listed["data"])

    async def test_a_list_cut_short_is_not_taken(self, start_gateway: Start) -> None:
        """Half a list would hide models: the whole one of before is kept."""
        async with fleet(2) as backends:
            config = {"health": FAST, "discovery": {"interval": 0.1}}
            gateway = await start_gateway(config=config, backends=urls(backends))
            await until(lambda: all("/v1/models" in b.probed for b in backends), "the model lists")
            whole = s.head(200, [s.JSON_TYPE, ("content-length", "4000")])
            for bad in (s.raw(whole + b'{"data": [', then="fin"), s.reply(500, b"{}"), s.reply(200, b"[1]")):
                backends[0].probes["/v1/models"] = bad
                count = len(backends[0].probed)
                await until(lambda c=count: len(backends[0].probed) > c + 3, "another look")  # type: ignore[misc]
                ids = {m["id"] for m in (await gateway.ask(s.get("/v1/models"))).json()["data"]}
                assert ids == {"m", "m0", "m1"}

    async def test_a_body_that_was_not_read_is_no_request(self, start_gateway: Start) -> None:
        """A GET with a body larger than what is looked at: what is left of it is never taken for the next request."""
        smuggled = b"GET /v1/smuggled HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n\r\n"
        async with fleet(2) as backends:
            gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends))
            client = await gateway.connect()
            body = b"x" * 100_000 + smuggled * 3
            await client.send(s.get("/v1/models", [("Content-Length", str(len(body)))]) + body[:100_000])
            assert (await client.read_response("GET")).status == 200
            with contextlib.suppress(ConnectionError):
                await client.send(body[100_000:])
                await client.send(s.get("/v1/next", [("X-Request-Id", "next")]))
            with contextlib.suppress(TimeoutError):
                await client.wait_closed(1)
            assert b"/v1/smuggled" not in b"".join(bytes(w.received) for b in backends for w in b.connections)
            assert not gateway.access_log(request_id="smuggled")
            assert client.received.count(b"HTTP/1.1 ") <= 2
            client.reset()


async def test_a_backend_taken_out_by_reload(start_gateway: Start) -> None:
    """Its streams go on to their end, no new request reaches it, and a new one is used at once."""
    async with fleet(3) as backends:
        old, stays, new = backends
        gateway = await start_gateway(config={"health": SLOW}, backends=urls(backends[:2]))
        held = s.Held(s.SSE_HEAD)
        old.script = held
        clients = [await gateway.connect() for _ in range(2)]
        for client in clients:
            await client.send(s.post())
        wire = await held.wire()
        assert gateway.config_path
        gateway.config_path.write_text(json.dumps({"backends": [{"url": b.url} for b in (stays, new)], "health": SLOW}))
        assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 200
        assert {(await gateway.ask()).status for _ in range(8)} == {200}
        assert len(old.requests) == 1
        assert new.requests
        await wire.send(b"".join(map(s.chunk, (s.delta("a"), *s.FINISHED))) + s.LAST)
        answers = [await client.read_response() for client in clients]
        assert all(a.complete for a in answers)
        for client in clients:
            client.fin()
        assert await gateway.metric("tokenpipe_requests_in_flight") == 0
