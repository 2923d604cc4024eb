"""Kept connections: used again only when they are provably clean, and never at the price of a 5xx or a wrong body."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway, until
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Connect = Callable[..., Awaitable[RawClient]]
POOL, CLIENT = 0.4, 5.0  # seconds: the pool's idle time, and the client side's: no busy machine is to come to it


def echo(request: Message) -> bytes:
    """An answer that only this request can get."""
    body = (request.get("x-request-id") or "").encode()
    return s.head(200, [("content-type", "text/plain"), ("content-length", str(len(body)))]) + body


def numbered(request_id: str, method: str = "POST") -> bytes:
    fields = [("X-Request-Id", request_id)]
    return s.post(fields=fields) if method == "POST" else s.get("/v1/x", fields)


def used(upstream: RawUpstream) -> list[HttpWire]:
    """The connections that carried more than probes."""
    return [wire for wire in upstream.connections if b"X-Request-Id" in wire.received or b"POST" in wire.received]


async def right(client: RawClient, request_id: str, method: str = "POST") -> None:
    answer = await client.ask(numbered(request_id, method))
    assert answer.status == 200, (request_id, answer.start, answer.body)
    assert answer.body == request_id.encode()


async def plain(wire: HttpWire, request: Message) -> None:
    await wire.send(echo(request))


@pytest.mark.config({"pool": {"idle": POOL}, "timeouts": {"keepalive": CLIENT}})
async def test_gaps_around_our_own_timers(gateway: Gateway, upstream: RawUpstream) -> None:
    """Pairs of requests, with gaps that sweep around the pool's idle time: every answer is right."""
    upstream.script = plain

    async def pair(number: int, gap: float) -> None:
        client = await gateway.connect()
        method = "POST" if number % 2 else "GET"
        await right(client, f"g{number}a", method)
        await asyncio.sleep(gap)
        await right(client, f"g{number}b", method)
        client.fin()

    gaps = [POOL + (n - 100) * 0.001 for n in range(200)]
    await asyncio.gather(*(pair(n, gap) for n, gap in enumerate(gaps)))
    counts = [r.get("x-request-id") for r in upstream.requests]
    assert len(counts) == len(set(counts)) == 400


@pytest.mark.config({"pool": {"idle": 30}, "retry": {"budget": 1.0}})
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_gaps_around_the_backends_timer(gateway: Gateway, upstream: RawUpstream, method: str) -> None:
    """The backend closes idle connections when the pool would still use them: what was seen closed is not used."""
    idle = 0.2

    async def serve(wire: HttpWire) -> None:
        wait = 10.0  # on a new connection: on a busy machine the request may take longer than an idle one is kept
        while True:
            try:
                request = await wire.read_request(timeout=wait)
            except TimeoutError:
                wire.fin()
                return
            wait = idle
            if request.path in upstream.probes:
                await wire.send(s.head(200, [("content-length", "0")]))
                continue
            upstream.requests.append(request)
            await wire.send(echo(request))

    upstream.on_connect = serve
    stale = 0

    async def pair(number: int) -> None:
        nonlocal stale
        client = await gateway.connect()
        await right(client, f"{method}{number}a", method)
        await asyncio.sleep(idle + (number - 60) * 0.001)
        answer = await client.ask(numbered(f"{method}{number}b", method))
        if answer.status == 502:
            # its POST and the backend's FIN crossed on the wire: nobody may repeat it
            assert (method, answer.get("x-gateway-error")) == ("POST", "stale_connection")
            stale += 1
        else:
            assert (answer.status, answer.body) == (200, f"{method}{number}b".encode())
        client.fin()

    await asyncio.gather(*(pair(n) for n in range(120)))
    counts = [r.get("x-request-id") for r in upstream.requests]
    assert len(counts) == len(set(counts))
    print(f"{method}: {stale} of 120 crossed on the wire")
    assert stale <= (3 if method == "POST" else 0)


EXTRA = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ninjected"
BEHIND = {
    "fin": b"",
    "reset": b"",
    "a response": EXTRA,
    "408": b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    "crlf": b"\r\n",
    "octet": b"x",
    "half a response": EXTRA[:20],
}


@pytest.mark.parametrize("delay", [None, 0.0, 0.001, 0.02])
@pytest.mark.parametrize("what", BEHIND)
async def test_what_comes_behind_a_response(
    gateway: Gateway, upstream: RawUpstream, what: str, delay: float | None
) -> None:
    """In the same write or a moment later: the next client gets its own answer, or is never the wiser."""

    async def script(wire: HttpWire, request: Message) -> None:
        if (request.get("x-request-id") or "").endswith("b"):
            await plain(wire, request)
            return
        if delay is None:
            await wire.send(echo(request) + BEHIND[what])
        else:
            await wire.send(echo(request))
            await asyncio.sleep(delay)
            with contextlib.suppress(ConnectionError):
                await wire.send(BEHIND[what])
        if what == "fin":
            wire.fin()
        elif what == "reset":
            wire.reset()

    upstream.script = script
    for number in range(6):
        for method in ("GET", "POST"):
            client = await gateway.connect()
            await right(client, f"{number}{method}a", method)
            if delay:
                await asyncio.sleep(delay + 0.02)  # it has arrived before the next request is sent
            other = await gateway.connect()
            if delay in (None, 0.02) or method == "GET":
                await right(other, f"{number}{method}b", method)
            else:
                answer = await other.ask(numbered(f"{number}{method}b"))
                assert b"injected" not in answer.body
                assert answer.status in (200, 502)
            client.fin()
            other.fin()
    counts = [r.get("x-request-id") for r in upstream.requests if r.method == "POST"]
    assert len(counts) == len(set(counts))


WITHOUT_A_BODY = {
    "204": s.head(204),
    "304": s.head(304, [("content-length", "8")]),
    "0": s.head(200, [("content-length", "0")]),
    "head": s.head(200, [("content-length", "8")]),
    "chunked": s.head(200, [("transfer-encoding", "chunked")]) + s.LAST,
}


@pytest.mark.parametrize("kind", WITHOUT_A_BODY)
async def test_octets_behind_what_has_no_body(gateway: Gateway, upstream: RawUpstream, kind: str) -> None:
    """A body where none may be is nobody's: neither this client's nor the next one's."""

    async def script(wire: HttpWire, request: Message) -> None:
        if request.get("x-request-id") == "a":
            await wire.send(WITHOUT_A_BODY[kind] + EXTRA)
        else:
            await plain(wire, request)

    upstream.script = script
    client = await gateway.connect()
    answer = await client.ask(numbered("a", "GET").replace(b"GET", b"HEAD" if kind == "head" else b"GET", 1))
    assert answer.complete
    await right(client, "b")
    assert b"injected" not in client.received
    client.fin()


@pytest.mark.config({"retry": {"budget": 1.0}})
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_kept_connection_that_ends_with_the_request_read(
    gateway: Gateway, upstream: RawUpstream, method: str, how: str
) -> None:
    """GET is sent once more; POST is 502 stale_connection, and its backend read it once."""

    async def script(wire: HttpWire, request: Message) -> None:
        if wire.received.count(b"X-Request-Id") > 1:
            wire.fin() if how == "fin" else wire.reset()
        else:
            await plain(wire, request)

    upstream.script = script
    client = await gateway.connect()
    await right(client, f"{method}-{how}-1", method)
    answer = await client.ask(numbered(f"{method}-{how}-2", method))
    count = sum(r.get("x-request-id") == f"{method}-{how}-2" for r in upstream.requests)
    if method == "GET":
        assert (answer.status, count) == (200, 2)
    else:
        assert (answer.status, answer.get("x-gateway-error"), count) == (502, "stale_connection", 1)
    client.fin()


@pytest.mark.parametrize("octets", range(0, 17, 4))
async def test_a_kept_connection_that_ends_within_its_answer(
    gateway: Gateway, upstream: RawUpstream, octets: int
) -> None:
    """Once an octet of the answer has come, nothing is sent again, not even a GET."""

    async def script(wire: HttpWire, request: Message) -> None:
        if wire.received.count(b"X-Request-Id") > 1:
            await wire.send(echo(request)[:octets])
            wire.fin()
        else:
            await plain(wire, request)

    upstream.script = script
    client = await gateway.connect()
    await right(client, "1", "GET")
    answer = await client.ask(numbered("2", "GET"))
    assert answer.status == (502 if octets else 200)
    assert sum(r.get("x-request-id") == "2" for r in upstream.requests) == (1 if octets else 2)
    client.fin()


@pytest.mark.config({"retry": {"replay_stale": True}})
async def test_replay_stale(gateway: Gateway, upstream: RawUpstream) -> None:
    """Where the operator says so, a POST on a stale connection is sent once more."""

    async def script(wire: HttpWire, request: Message) -> None:
        if wire.received.count(b"X-Request-Id") > 1:
            wire.reset()
        else:
            await plain(wire, request)

    upstream.script = script
    client = await gateway.connect()
    await right(client, "1")
    await right(client, "2")
    client.fin()


class TestPool:
    @pytest.mark.config({"pool": {"idle": 0.3}})
    async def test_idle(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Kept for that long and no longer: used again just before, closed just after."""
        upstream.script = plain
        client = await gateway.connect()
        for number in range(3):
            await right(client, f"i{number}")
            await asyncio.sleep(0.2)
        (wire,) = used(upstream)
        await right(client, "i9")
        began = time.monotonic()
        assert 0.25 < await wire.wait_closed(2) - began < 0.6
        await right(client, "after")
        assert len(used(upstream)) == 2
        client.fin()

    @pytest.mark.config({"pool": {"max_age": 0.4}})
    async def test_max_age(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """However busy, a connection is used no longer than that: new ones follow where the name points."""
        upstream.script = plain
        client = await gateway.connect()
        began, number = time.monotonic(), 0
        while time.monotonic() - began < 1.0:
            await right(client, f"m{number}")
            number += 1
            await asyncio.sleep(0.01)
        assert 2 <= len(used(upstream)) <= 4
        client.fin()

    @pytest.mark.config({"pool": {"max_idle": 2}})
    async def test_max_idle(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """No more than that many are kept; the others end with their exchange."""
        gate = asyncio.Event()

        async def script(wire: HttpWire, request: Message) -> None:
            await gate.wait()
            await plain(wire, request)

        upstream.script = script
        clients = [await gateway.connect() for _ in range(6)]
        asking = [asyncio.create_task(right(c, f"x{n}")) for n, c in enumerate(clients)]
        await upstream.wait_requests(6)
        gate.set()
        await asyncio.gather(*asking)
        await until(lambda: sum(not w.ended for w in used(upstream)) == 2, "four closed")
        for client in clients:
            client.fin()

    @pytest.mark.config({"pool": {"max_idle": 0}})
    async def test_none(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Every exchange on a connection of its own."""
        upstream.script = plain
        client = await gateway.connect()
        for number in range(4):
            await right(client, f"n{number}")
        assert len(used(upstream)) == 4
        client.fin()

    async def test_close_is_obeyed(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """`Connection: close`, HTTP/1.0, and a body that ends with the connection: not kept, though it stays open."""
        for number, fields in enumerate(([("connection", "close")], [("Connection", "x, Close")])):
            upstream.script = s.raw(s.head(200, [*fields, ("content-length", "1")]) + b"x")
            before = len(used(upstream))
            for _ in range(2):
                assert (await gateway.ask(numbered(f"c{number}"))).body == b"x"
            assert len(used(upstream)) == before + 2
        upstream.script = s.raw(b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx")
        before = len(used(upstream))
        for _ in range(2):
            assert (await gateway.ask(numbered("v"))).body == b"x"
        assert len(used(upstream)) == before + 2

    async def test_an_answer_before_the_request_is_complete(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A connection on which a request was not sent whole is never used again."""

        async def early(wire: HttpWire) -> None:
            while True:
                request = await wire.read_request(body=False)
                await wire.send(echo(request))
                if request.get("content-length") != "500000":
                    continue
                await wire.wait_closed()
                return

        upstream.on_connect = early
        client = await gateway.connect()
        head = s.get("/v1/audio/x", [("Content-Length", "500000"), ("X-Request-Id", "early")], method="POST")
        await client.send(head + b"x" * 100_000)
        assert (await client.read_response()).body == b"early"
        other = await gateway.connect()
        await right(other, "next", "GET")
        other.fin()
        client.reset()


async def test_client_pipelining(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """Requests sent ahead are answered in order, each with its own answer, however they are cut."""
    upstream.script = plain
    chance = random.Random(1)
    client = await connect()
    octets = b"".join(numbered(f"p{n}", chance.choice(["GET", "POST"])) for n in range(60))
    sending = asyncio.create_task(client.send_split(octets, size=97))
    for number in range(60):
        assert (await client.read_response()).body == f"p{number}".encode()
    await sending


async def test_client_versions(gateway: Gateway, upstream: RawUpstream, connect: Connect) -> None:
    """HTTP/1.1 goes on unless it says close; HTTP/1.0 ends unless it says keep-alive, and is told so."""
    upstream.script = plain
    for version, field, stays in (("1.1", "", True), ("1.1", "close", False), ("1.1", "Keep-Alive, Close", False),
                                  ("1.0", "", False), ("1.0", "keep-alive", True)):  # fmt: skip
        client = await connect()
        request = s.post(version=version, fields=[("Connection", field)] if field else [])
        for _ in range(2 if stays else 1):
            answer = await client.ask(request)
            assert answer.status == 200
        if version == "1.0" and stays:
            assert (answer.get("connection") or "").lower() == "keep-alive"
        if not stays:
            await client.wait_closed(1)


async def test_a_client_that_closes_between_requests(gateway: Gateway, upstream: RawUpstream) -> None:
    """By FIN or RST, at every moment behind an answer: nothing is logged but its one line."""
    upstream.script = plain
    for number in range(40):
        client = await gateway.connect()
        await client.send(numbered(f"z{number}", "GET"))
        await client.read_response("GET")
        await asyncio.sleep(0.0005 * (number % 5))
        client.fin() if number % 2 else client.reset()
    for number in range(40):
        (entry,) = await gateway.logged(request_id=f"z{number}")
        assert entry["outcome"] == "complete"


TIMED_OUT = b"HTTP/1.0 408 Request Time-out\r\nConnection: close\r\nContent-Type: text/html\r\n\r\n<html/>"
CLOSES = s.head(408, [("connection", "close"), ("content-length", "0")], "Request Timeout")


class Impatient:
    """Answers one request a connection, and the next one, at which it has not looked, with 408 and its end; `always`: the first
    one, too. `before`: what it says of that request before."""

    def __init__(self, word: bytes, *, always: bool = False, then: s.Script = plain, before: bytes = b"") -> None:
        self.word, self.always, self.then, self.before = word, always, then, before

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        if self.always or wire.received.count(b"HTTP/1.1\r\n") > 1:
            await wire.send(self.before + self.word)
            wire.fin()
        else:
            await self.then(wire, request)


class TestTimedOut:
    """408 on an idle connection crosses our request (RFC 9110 section 15.5.9): HAProxy and others send it."""

    @pytest.mark.parametrize("word", [TIMED_OUT, CLOSES], ids=["haproxy", "http/1.1"])
    @pytest.mark.parametrize("method", ["GET", "POST"])
    @pytest.mark.config({"retry": {"attempts": 1, "budget": 0}})
    async def test_it_was_meant_for_nobody(self, gateway: Gateway, upstream: RawUpstream, method: str, word: bytes) -> None:
        """The request is sent once more on a fresh connection, a POST, too, and nobody's second try is spent."""
        upstream.script = Impatient(word)
        client, before = await gateway.connect(), await gateway.metric("tokenpipe_retries_total")
        for number in range(120):  # more than the budget has in hand
            await right(client, f"{method}-{number}", method)
        client.fin()
        counts = [sum(r.get("x-request-id") == f"{method}-{n}" for r in upstream.requests) for n in range(120)]
        assert set(counts) == {1, 2}
        assert await gateway.metric("tokenpipe_retries_total", reason="stale_connection") == before + counts.count(2)
        assert await gateway.metric("tokenpipe_backend_failures_total") == 0
        *_, entry = await gateway.logged(request_id=f"{method}-1")
        assert (entry["attempts"], entry["status"]) == (2, 200)

    @pytest.mark.config({"models": {"m": {"hedge": {"after": 60, "unstreamed": 60}}}, "commit": "first_event"})
    async def test_in_a_race(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Where a second backend may be asked beside it, too."""
        upstream.script = Impatient(TIMED_OUT)
        client = await gateway.connect()
        for number in range(3):
            await right(client, f"r{number}")
        client.fin()

    @pytest.mark.parametrize("why", ["fresh", "keeps", "continues", "another"])
    async def test_it_was_meant_for_us(self, gateway: Gateway, upstream: RawUpstream, why: str) -> None:
        """On a fresh connection, on one that goes on, after a word that the request is read, and any other status."""
        keeps = s.head(408, [("content-length", "0")])
        word = {"keeps": keeps, "another": CLOSES.replace(b"408", b"503")}.get(why, CLOSES)
        before = b"HTTP/1.1 100 Continue\r\n\r\n" if why == "continues" else b""
        upstream.script = Impatient(word, always=why == "fresh", before=before)
        client = await gateway.connect()
        if why != "fresh":
            await right(client, "0")
        answer = await client.ask(numbered("1"))
        assert answer.status == (503 if why == "another" else 408)
        assert sum(r.get("x-request-id") == "1" for r in upstream.requests) == 1
        client.fin()

    async def test_once_more_is_once(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """What the fresh connection answers is the answer."""
        upstream.script = Impatient(CLOSES)
        client = await gateway.connect()
        await right(client, "0")
        upstream.script = Impatient(CLOSES, always=True)
        assert (await client.ask(numbered("1"))).status == 408
        assert sum(r.get("x-request-id") == "1" for r in upstream.requests) == 2
        client.fin()

    async def test_half_a_body_gets_it(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Of a body that is under way the backend may well have seen too little: its answer is the client's."""

        async def serve(wire: HttpWire) -> None:
            await wire.send(echo(await wire.read_request()))
            if not (await wire.read_request(body=False)).path.endswith("transcriptions"):
                return
            await wire.send(CLOSES)
            wire.fin()

        upstream.on_connect = serve
        client = await gateway.connect()
        await right(client, "0")
        whole = s.post(b"x" * 300_000, "/v1/audio/transcriptions").replace(b"application/json", b"audio/wav")
        await client.send(whole[:150_000])
        answer = await client.read_response()
        assert answer.status == 408
        client.reset()
