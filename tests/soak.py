"""Many streams with every ending mixed in, and then a look at what is left of them: `make soak`.

    python -m tests.soak [--streams 100000] [--concurrency 200] [--seed 1] [--folder DIR]

One gateway as a process of its own; its engine and its clients are raw asyncio protocols in this one. Three parts: in
`main` all that streams, whole, cut and refused; in `connect` the backend takes no connection; in `queue` one stream
holds the only slot. Every exchange is checked as its kind has it: the bytes where it is complete, a visible cut where
it is not, the upstream's connection closed where the client has left. The outcomes counted must be those caused,
with one line of the log for each. Then the process must be as it was after the first few thousand: nothing in
flight, and descriptors, tasks, objects and memory as at the start. Exit status 1 where anything is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.gateway import Gateway
from tests.support.script import CHAT, DONE, FINISHED, LAST, SSE_HEAD, chunk, delta, event, get, head, post

SECONDS = 30.0  # within which whatever is waited for must come
GROWTH = 8 << 20  # octets of memory that may be had beyond those after the warm-up: fragments, and the log's own
PHASES = ("read", "queue", "connect", "wait", "first_token", "stream")
LEFT_TO_SETTLE = 15.0  # seconds until idle connections, probes and timers are gone

# What runs inside the gateway: on SIGUSR1 it writes down what lives.
INSIDE = """
import asyncio, collections, gc, json, os, signal
KEPT = {"Exchange", "Call", "Relay", "Meter", "Connection", "Downstream", "Request", "Watch", "Lease", "Upload"}
def look(*_):
    gc.collect()
    found = collections.Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind.__name__ == "Task" and not thing.done():
            found["tasks"] += 1
        elif kind.__name__ in KEPT and str(kind.__module__).startswith("gateway."):
            found[kind.__name__] += 1
    path = os.environ["SOAK_LOOK"]
    with open(path + ".new", "w") as file:
        json.dump(found, file)
    os.replace(path + ".new", path)
signal.signal(signal.SIGUSR1, look)
"""

STREAM = [delta("", role="assistant"), *(delta(f" word{n}") for n in range(6)), *FINISHED]
WORDS = b"".join(STREAM)
BIG = delta("x" * 16000)
NOTHING = [event({"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}), DONE]
PLENTY = [BIG] * 32 + list(FINISHED)
DIED = event({"error": {"message": "the engine died", "type": "InternalServerError", "param": None, "code": 500}})
FAILS = [*STREAM[:4], DIED, DONE]
JSON_BODY = b'{"id":"c","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}'
LENGTH_HEAD = head(200, [("content-type", "application/json"), ("content-length", str(len(JSON_BODY)))])
CLOSE_HEAD = head(200, [("content-type", "text/event-stream"), ("connection", "close")])

# ---- the engine


class Origin(asyncio.Protocol):
    """One connection of the engine's. Each request names its case, and the case says what is to be answered."""

    def __init__(self, soak: Soak):
        self.soak, self.transport = soak, None
        self.received, self.lost, self.paused = b"", False, False
        self.case: Case | None = None
        self.go_on: Callable[[], None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        found = re.search(rb"\ncontent-length: *(\d+)", self.received[:end], re.I)
        if len(self.received) < end + 4 + (int(found[1]) if found else 0):
            return
        request, self.received = self.received, b""
        if request.startswith((b"GET /health ", b"GET /v1/models ")):
            body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
            self.write(head(200, [("content-type", "application/json"), ("content-length", str(len(body)))]) + body)
            return
        number = re.search(rb"\nx-soak: *(\d+)", request, re.I)
        assert number, request[:300]
        case = self.case = self.soak.cases.get(int(number[1]))
        if case is not None:  # else its client has left already, and the gateway is about to
            case.origin = self
            case.kind.serve(self)

    def write(self, data: bytes) -> None:
        if not self.lost:
            self.transport.write(data)

    def later(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, lambda: self.lost or what(*arguments))

    def end(self, how: str) -> None:
        if how == "rst":
            reset_on_close(self.transport)
            self.transport.abort()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        self.paused = True
        if self.case is not None:
            self.case.blocked.set()

    def resume_writing(self) -> None:
        self.paused = False
        if self.go_on is not None:
            self.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.case is not None and self.case.origin is self:
            self.case.lost_at = time.monotonic()
            self.case.lost.set()


def reset_on_close(transport: Any) -> None:
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silent(origin: Origin) -> None:
    pass


def at_once(*pieces: bytes, then: str = "keep", delay: float = 0.0) -> Callable[[Origin], None]:
    """All of it in one write, and perhaps the connection's end, `delay` later."""
    whole = b"".join(pieces)

    def serve(origin: Origin) -> None:
        if whole:
            origin.write(whole)
        if then != "keep":
            origin.later(delay, origin.end, then)

    return serve


def paced(*pieces: bytes, gap: float = 0.002) -> Callable[[Origin], None]:
    """One write a piece."""

    def serve(origin: Origin, at: int = 0) -> None:
        origin.write(pieces[at])
        if at + 1 < len(pieces):
            origin.later(gap, serve, origin, at + 1)

    return serve


def sse(*events: bytes) -> Callable[[Origin], None]:
    return at_once(SSE_HEAD, *map(chunk, events), LAST)


def splintered(origin: Origin) -> None:
    """A whole stream, cut anywhere: within size lines, events and characters."""
    data = SSE_HEAD + b"".join(map(chunk, STREAM)) + LAST
    cuts = sorted({0, len(data), *(origin.soak.random.randrange(1, len(data)) for _ in range(6))})
    paced(*(data[a:b] for a, b in itertools.pairwise(cuts)), gap=0.001)(origin)


def endless(text: bytes, gap: float) -> Callable[[Origin], None]:
    """Events without end, each `gap` seconds, or without a gap as fast as they are taken."""
    piece = chunk(text)

    def more(origin: Origin) -> None:
        if gap:
            origin.write(piece)
            origin.later(gap, more, origin)
            return
        while not origin.paused and not origin.transport.is_closing():
            origin.write(piece)

    def serve(origin: Origin) -> None:
        origin.write(SSE_HEAD)
        origin.go_on = None if gap else lambda: more(origin)
        more(origin)

    return serve


def plenty(origin: Origin) -> None:
    origin.write(SSE_HEAD + b"".join(map(chunk, PLENTY)) + LAST)


# ---- the clients


class Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: Any = None
        self.data, self.lost, self.answers = bytearray(), None, 0
        self._want: Callable[[bytearray], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self._want is not None and self._want(self.data):
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = "rst" if exc else "fin"
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def until(self, want: Callable[[bytearray], bool]) -> bool:
        """Wait until what has come is as wanted, or the connection has ended; which of the two."""
        if not want(self.data) and self.lost is None:
            self._want, self._waiter = want, asyncio.get_running_loop().create_future()
            async with asyncio.timeout(SECONDS):
                await self._waiter
            self._want = self._waiter = None
        return want(self.data)

    def leave(self, how: str) -> None:
        if self.transport.is_closing():
            return
        if how == "rst":
            reset_on_close(self.transport)
            self.transport.abort()
        else:
            self.transport.write_eof()


def never(data: bytearray) -> bool:
    return False


def whole(data: bytearray) -> bool:
    """A whole message, as its framing has it."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    start = bytes(data[:end]).lower()
    if b"\ntransfer-encoding: chunked" in start:
        return data.endswith(b"\r\n0\r\n\r\n")
    length = re.search(rb"\ncontent-length: (\d+)", start)
    return length is not None and len(data) >= end + 4 + int(length[1])


def body_of(data: bytearray) -> bytes:
    start, _, rest = bytes(data).partition(b"\r\n\r\n")
    if b"\ntransfer-encoding: chunked" not in start.lower():
        return rest
    pieces, at = [], 0
    while at < len(rest):
        line = rest.index(b"\r\n", at)
        size = int(rest[at:line], 16)
        pieces.append(rest[line + 2 : line + 2 + size])
        at = line + size + 4
    return b"".join(pieces)


class Wrong(AssertionError):
    """An exchange that did not go as its kind has it."""


class Case:
    """One exchange."""

    def __init__(self, soak: Soak, kind: Kind, number: int):
        self.soak, self.kind, self.number = soak, kind, number
        self.origin: Origin | None = None
        self.lost_at = 0.0
        self.lost, self.blocked = asyncio.Event(), asyncio.Event()  # the upstream's connection

    @property
    def request(self) -> bytes:
        return post(CHAT, fields=self.fields)

    @property
    def fields(self) -> list[tuple[str, str]]:
        return [("X-Soak", str(self.number))]

    async def upstream_closed(self, since: float | None = None) -> None:
        """The engine must be told at once when its client has left."""
        async with asyncio.timeout(SECONDS):
            await self.lost.wait()
        if since is not None:
            self.soak.aborts.append(self.lost_at - since)


Act = Callable[[Case], Awaitable[None]]


class Kind(NamedTuple):
    name: str
    weight: float
    outcomes: tuple[str, ...]  # one: this very one. More, or "": any of these, "" being not counted at all
    serve: Callable[[Origin], None]
    act: Act


def need(condition: object, what: str, client: Client) -> None:
    if not condition:
        got = f"{len(client.data)} octets, at last {bytes(client.data[-160:])!r}"
        raise Wrong(f"{what}; its connection: {client.lost or 'open'}; it got {got}")


def reads(body: bytes | None = WORDS, *, request: Callable[[Case], bytes] | None = None, then: str = "keep") -> Act:
    """A client that reads to the end, which must be the proper one; it may ask again on its connection."""

    async def act(case: Case) -> None:
        client = await case.soak.client()
        client.transport.write(request(case) if request else case.request)
        need(await client.until(whole), "no whole answer", client)
        need(client.data.startswith(b"HTTP/1.1 200 "), "not 200", client)
        need(body is None or body_of(client.data) == body, "not the bytes that were sent", client)
        if then == "keep":
            case.soak.give_back(client)
        else:
            client.leave(then)

    return act


async def reads_http_1_0(case: Case) -> None:
    """Nothing but the connection's end tells the end."""
    client = await case.soak.client()
    client.transport.write(post(CHAT, fields=case.fields, version="1.0"))
    await client.until(never)
    need(client.lost == "fin" and body_of(client.data) == WORDS, "not whole", client)


def refused(status: int, code: bytes | None, request: Callable[[Case], bytes] | None = None) -> Act:
    """An answer with this status, and this code where it is the gateway's own."""

    async def act(case: Case) -> None:
        client = await case.soak.client()
        client.transport.write(request(case) if request else case.request)
        need(await client.until(whole), "no whole answer", client)
        need(client.data.startswith(b"HTTP/1.1 %d " % status), f"not {status}", client)
        need(code is None or re.search(rb"\r\nX-Gateway-Error: (%b)\r\n" % code, client.data), f"not {code!r}", client)
        if re.search(rb"\r\nconnection: close\r\n", client.data, re.I):
            client.transport.close()
        else:
            case.soak.give_back(client)

    return act


async def is_cut(case: Case) -> None:
    """A client that can tell: its connection ends, and the message has not."""
    client = await case.soak.client()
    client.transport.write(case.request)
    await client.until(never)
    need(client.data.startswith(b"HTTP/1.1 200 ") and not whole(client.data), "a cut that looks like an end", client)


def leaves(how: str, when: Callable[[bytearray], bool] | float, *, reached: bool = True, part: float = 1.0) -> Act:
    """A client that leaves at some point, having sent `part` of its request. `reached`: an upstream is to be told."""

    async def act(case: Case) -> None:
        client = await case.soak.client(fresh=True)
        request = case.request
        client.transport.write(request[: int(len(request) * part)])
        if callable(when):
            need(await client.until(when), "the stream did not begin", client)
        elif when:
            await asyncio.sleep(when)
        async with asyncio.timeout(SECONDS):
            while reached and case.origin is None:
                await asyncio.sleep(0.005)
        left = time.monotonic()
        client.leave(how)
        if reached:
            await case.upstream_closed(left)
        elif how == "fin":
            await client.until(never)
        client.transport.abort()

    return act


def leaves_blocked(how: str) -> Act:
    async def act(case: Case) -> None:
        client = await case.soak.client(fresh=True, receive_buffer=4096)
        client.transport.pause_reading()
        client.transport.write(case.request)
        async with asyncio.timeout(SECONDS):
            await case.blocked.wait()
        await asyncio.sleep(0.02)
        left = time.monotonic()
        client.leave(how)
        await case.upstream_closed(left)
        client.transport.abort()

    return act


async def stalls(case: Case) -> None:
    """It stops reading, and stays: the gateway is to end it."""
    client = await case.soak.client(fresh=True, receive_buffer=4096)
    client.transport.pause_reading()
    client.transport.write(case.request)
    await case.upstream_closed()
    client.transport.resume_reading()
    await client.until(never)
    need(not whole(client.data), "a stalled stream that looks whole", client)


async def reads_slowly(case: Case) -> None:
    client = await case.soak.client(fresh=True, receive_buffer=16384)
    client.transport.write(case.request)
    while not whole(client.data) and client.lost is None:
        client.transport.pause_reading()
        await asyncio.sleep(0.005)
        client.transport.resume_reading()
        size = len(client.data)
        await client.until(lambda data, size=size: len(data) > size or whole(data))  # type: ignore[misc]
    need(whole(client.data) and body_of(client.data) == b"".join(PLENTY), "not the bytes that were sent", client)
    client.transport.close()


def upload(case: Case) -> bytes:
    return post({**CHAT, "messages": [{"role": "user", "content": "long " * 300_000}]}, fields=case.fields)


def field(case: Case) -> bytes:
    return post({**CHAT, "kv_transfer_params": {"do_remote_prefill": True}}, fields=case.fields)


def begun(data: bytearray) -> bool:
    return b"\r\n\r\n" in data


def amid(data: bytearray) -> bool:
    return data.count(b"data: ") >= 3


FIRST = tuple(map(chunk, STREAM[:4]))
ALL = tuple(map(chunk, STREAM))
SLOWLY = endless(delta(" word"), 0.005)
FLOOD = endless(BIG, 0)
GONE = ("client_gone",)
PERHAPS = ("client_gone", "")

BAD_HEAD = b"HTTP/1.1 200 OK\r\n no field\r\n\r\n"
S400 = head(400, [("content-length", "2")], "Bad Request") + b"{}"
S503 = head(503, [("content-length", "2")], "Service Unavailable") + b"{}"
TOLD = b"upstream_reset|stale_connection"
COMPLETE, RESET, STATUS, REFUSED = ("complete",), ("upstream_reset",), ("upstream_status",), ("refused",)
TWICE, HUGE = ("Content-Length", "1"), ("Content-Length", "99999999")
STARTS, EVENTS, HALF = SSE_HEAD + b"".join(FIRST), b"".join(ALL) + LAST, b"ff\r\ndata: {"


def sends(**more: Any) -> Callable[[Case], bytes]:
    return lambda case: post(**{"body": CHAT, "fields": case.fields, **more})


big = sends(fields=[HUGE], length=False)
MAIN = [
    Kind("complete, event by event", 20, COMPLETE, paced(SSE_HEAD, *ALL, LAST), reads()),
    Kind("complete, in one write", 8, COMPLETE, at_once(SSE_HEAD, EVENTS), reads()),
    Kind("complete, splintered", 5, COMPLETE, splintered, reads()),
    Kind("complete, Content-Length", 8, COMPLETE, at_once(LENGTH_HEAD, JSON_BODY), reads(JSON_BODY)),
    Kind("complete, close-delimited", 3, COMPLETE, at_once(CLOSE_HEAD, WORDS, then="fin"), reads()),
    Kind("complete, HTTP/1.0 client", 2, COMPLETE, paced(SSE_HEAD, *ALL, LAST), reads_http_1_0),
    Kind("complete, long upload", 0.2, COMPLETE, at_once(SSE_HEAD, EVENTS), reads(request=upload)),
    Kind("complete, then FIN", 2, COMPLETE, at_once(SSE_HEAD, EVENTS), reads(then="fin")),
    Kind("complete, then RST", 2, COMPLETE, at_once(SSE_HEAD, EVENTS), reads(then="rst")),
    Kind("complete, slow reader", 0.5, COMPLETE, plenty, reads_slowly),
    Kind("no output event", 1, ("empty",), sse(*NOTHING), reads(b"".join(NOTHING))),
    Kind("error event in the stream", 2, ("stream_error",), sse(*FAILS), reads(b"".join(FAILS))),
    Kind("clean end, no [DONE]", 2, ("upstream_truncated",), sse(*STREAM[:4]), reads(b"".join(STREAM[:4]))),
    Kind("upstream FIN mid-stream", 3, RESET, at_once(STARTS, then="fin", delay=0.003), is_cut),
    Kind("upstream RST mid-stream", 3, RESET, at_once(STARTS, then="rst", delay=0.003), is_cut),
    Kind("upstream FIN mid-event", 2, RESET, at_once(STARTS, HALF, then="fin", delay=0.003), is_cut),
    Kind("malformed chunk", 2, RESET, at_once(STARTS, b"zz\r\ndata"), is_cut),
    Kind("upstream FIN, no head", 2, RESET, at_once(then="fin"), refused(502, TOLD)),
    Kind("upstream RST, no head", 2, RESET, at_once(then="rst"), refused(502, TOLD)),
    Kind("malformed head", 1, RESET, at_once(BAD_HEAD), refused(502, b"upstream_malformed")),
    Kind("status 400", 3, STATUS, at_once(S400), refused(400, None)),
    Kind("status 503", 3, STATUS, at_once(S503), refused(503, None)),
    Kind("silence, no head", 0.3, ("timeout_first_byte",), silent, refused(504, b"timeout_first_byte")),
    Kind("silence mid-stream", 0.3, ("timeout_idle",), at_once(STARTS), is_cut),
    Kind("refused: path", 1, REFUSED, silent, refused(404, b"unknown_path", sends(path="/sleep"))),
    Kind("refused: no JSON", 1, REFUSED, silent, refused(400, b"bad_request", sends(body=b"{]"))),
    Kind("refused: field", 1, REFUSED, silent, refused(400, b"bad_request", field)),
    Kind("refused: framed twice", 1, REFUSED, silent, refused(400, b"bad_request", sends(fields=[TWICE]))),
    Kind("refused: too large", 0.5, REFUSED, silent, refused(413, b"body_too_large", big)),
    Kind("client stalls", 0.3, ("client_stalled",), FLOOD, stalls),
]
for HOW in ("fin", "rst"):
    MAIN += [
        Kind(f"client {HOW.upper()}, within its head", 1, ("",), silent, leaves(HOW, 0.01, reached=False, part=0.2)),
        Kind(f"client {HOW.upper()}, within its body", 2, PERHAPS, silent, leaves(HOW, 0.01, reached=False, part=0.9)),
        Kind(f"client {HOW.upper()}, at once", 1, PERHAPS, SLOWLY, leaves(HOW, 0, reached=False)),
        Kind(f"client {HOW.upper()}, waiting for the head", 2, GONE, silent, leaves(HOW, 0.005)),
        Kind(f"client {HOW.upper()}, silence after the head", 2, GONE, at_once(SSE_HEAD), leaves(HOW, begun)),
        Kind(f"client {HOW.upper()}, mid-stream", 3, GONE, SLOWLY, leaves(HOW, amid)),
        Kind(f"client {HOW.upper()}, mid-event", 2, GONE, at_once(STARTS, HALF), leaves(HOW, amid)),
        Kind(f"client {HOW.upper()}, blocked", 1, GONE, FLOOD, leaves_blocked(HOW)),
    ]
CONNECT = [
    Kind("client FIN, connecting", 4, GONE, silent, leaves("fin", 0.03, reached=False)),
    Kind("client RST, connecting", 4, PERHAPS, silent, leaves("rst", 0.03, reached=False)),
    Kind("backend takes no connection", 1, ("timeout_connect",), silent, refused(504, b"timeout_connect")),
]
QUEUE = [
    Kind("client FIN, queued", 4, GONE, silent, leaves("fin", 0.03, reached=False)),
    Kind("client RST, queued", 4, PERHAPS, silent, leaves("rst", 0.03, reached=False)),
    Kind("nobody's turn", 1, ("refused",), silent, refused(503, b"queue_timeout")),
]
HOLDER = Kind("holds the only slot", 0, GONE, SLOWLY, leaves("fin", amid))


class Soak:
    def __init__(self, streams: int, concurrency: int, seed: int, folder: Path):
        self.streams, self.concurrency, self.folder, self.random = streams, concurrency, folder, random.Random(seed)
        self.cases: dict[int, Case] = {}
        self.kept: list[Client] = []
        self.aborts: list[float] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.failed: dict[str, list[str]] = collections.defaultdict(list)
        self.sure: collections.Counter[str] = collections.Counter()  # outcomes that must have been counted
        self.perhaps: collections.Counter[str] = collections.Counter()  # and those that may have been
        self.number = 0

    # clients

    async def client(self, *, fresh: bool = False, receive_buffer: int | None = None) -> Client:
        while self.kept and not fresh:
            client = self.kept.pop()
            if client.lost is None and not client.transport.is_closing():
                client.data.clear()
                return client
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SECONDS):
            await loop.sock_connect(sock, (self.gateway.host, self.gateway.port))
            _, client = await loop.create_connection(Client, sock=sock)
        return client

    def give_back(self, client: Client) -> None:
        client.answers += 1
        if client.answers < 50 and len(self.kept) < self.concurrency:
            self.kept.append(client)
        else:
            client.transport.close()

    # cases

    async def run(self, kind: Kind) -> None:
        self.number += 1
        case = self.cases[self.number] = Case(self, kind, self.number)
        try:
            await kind.act(case)
        except Exception as error:  # whatever it is, it is one more that went wrong
            self.failed[kind.name].append(f"{type(error).__name__}: {error}")
        finally:
            del self.cases[case.number]
        self.done[kind.name] += 1
        if len(kind.outcomes) == 1:
            self.sure.update(filter(None, kind.outcomes))
        else:
            self.perhaps.update(filter(None, kind.outcomes))

    async def mixed(self, kinds: list[Kind], count: int, concurrency: int) -> None:
        chosen = self.random.choices(kinds, [kind.weight for kind in kinds], k=count)
        if count >= len(kinds):
            chosen[: len(kinds)] = kinds  # each of them once at least
        self.random.shuffle(chosen)
        last = time.monotonic()

        async def worker() -> None:
            nonlocal last
            while chosen:
                await self.run(chosen.pop())
                if time.monotonic() - last > 10:
                    last = time.monotonic()
                    print(f"  {len(chosen)} to go, {sum(map(len, self.failed.values()))} failed", file=sys.stderr)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    # the gateway

    async def start(self, upstream: str) -> None:
        (self.folder / "sitecustomize.py").write_text(INSIDE)
        self.main = self.config(upstream)
        environment = {"PYTHONPATH": str(self.folder), "SOAK_LOOK": str(self.folder / "look.json")}
        self.gateway = await Gateway.start(self.folder, config=self.main, environment=environment)

    def config(self, upstream: str, **more: Any) -> dict[str, Any]:
        timeouts = {"first_byte": 2, "idle": 2, "client_write": 2, "connect": 0.5, "queue": 0.5, "request_body": 20}
        return {"backends": [{"name": upstream.rpartition(":")[2], "url": upstream}], "timeouts": timeouts,
                "pool": {"idle": 1}, "health": {"interval": 3600},
                "log": {"format": "json", "level": "error"}, **more}  # fmt: skip

    async def reload(self, config: dict[str, Any]) -> None:
        assert self.gateway.config_path
        self.gateway.config_path.write_text(json.dumps(config))
        answer = await self.gateway.admin(get("/-/reload", method="POST"))
        assert answer.status == 200, answer.body

    async def look(self) -> dict[str, float]:
        """What the process holds, once idle connections and their timers have gone."""
        for client in self.kept:
            client.transport.close()
        self.kept.clear()
        path, settled = self.folder / "look.json", {}
        deadline = time.monotonic() + LEFT_TO_SETTLE
        while True:
            await asyncio.sleep(1.5)
            path.unlink(missing_ok=True)
            self.gateway.signal(signal.SIGUSR1)
            async with asyncio.timeout(SECONDS):
                while not path.exists():
                    await asyncio.sleep(0.02)
            before, settled = settled, json.loads(path.read_text())
            samples = await self.gateway.metrics()
            settled |= {
                "in flight": samples.value("tokenpipe_requests_in_flight"),
                "queued": samples.value("tokenpipe_queue_depth"),
                "octets held for clients": samples.value("tokenpipe_write_buffer_bytes"),
                "upstream connections": samples.value("tokenpipe_upstream_connections"),
                "streams listed": float(len((await self.gateway.admin(get("/-/streams"))).json())),
                "descriptors": float(self.gateway.fds()),
            }
            if before == settled or time.monotonic() > deadline:
                return settled | {"memory": float(self.gateway.rss())}

    async def counted(self) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        for name, labels, value in await self.gateway.metrics():
            if name == "tokenpipe_requests_total":
                found[labels["outcome"]] += int(value)
        return found


    async def aborted(self) -> dict[str, int]:
        """In which phase clients left."""
        return {
            labels["phase"]: int(value)
            for name, labels, value in await self.gateway.metrics()
            if name == "tokenpipe_client_aborts_total"
        }


async def deaf() -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose queue is full: a connection to it is neither taken nor refused."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    for _ in range(2):
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(listener.getsockname())
        fillers.append(sock)
    await asyncio.sleep(0.1)
    return listener, fillers


async def soak(options: argparse.Namespace, folder: Path) -> bool:
    this = Soak(options.streams, options.concurrency, options.seed, folder)
    server = await asyncio.get_running_loop().create_server(lambda: Origin(this), "127.0.0.1", 0, backlog=1024)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await this.start(url)
    began = time.monotonic()
    try:
        warm = 5000  # by then memory stands at its level: it is the same after 100,000 more
        print(f"warming up with {warm} streams, then {options.streams}", file=sys.stderr)
        await this.mixed(MAIN, warm, options.concurrency)
        await parts(this, url, warm // 20)
        start = await this.look()
        each = options.streams // 33
        measured = time.monotonic()
        await this.mixed(MAIN, options.streams - 2 * each, options.concurrency)
        await parts(this, url, each)
        seconds = time.monotonic() - measured
        end = await this.look()
        good = report(this, start, end, await this.counted()) & phases(await this.aborted())
        this.gateway.signal(signal.SIGTERM)
        await this.gateway.stopped()
        logged = len(this.gateway.access_log())
    finally:
        this.gateway.kill()
        server.close()
    counted = sum(this.sure.values())
    lines = counted <= logged <= counted + sum(this.perhaps.values())
    print(f"\n{'ok  ' if lines else 'FAIL'} {logged} lines in the access log, one an exchange")
    pace = f"{options.streams} streams in {seconds:.0f} s, {options.streams / seconds:.0f} a second"
    print(f"{pace}; {time.monotonic() - began:.0f} s in all")
    good = good and lines
    print("soak: passed" if good else f"soak: FAILED; the gateway's own output is in {folder}")
    return good


async def parts(this: Soak, url: str, each: int) -> None:
    """What needs another configuration. It is put in force by a reload, with all else going on."""
    listener, fillers = await deaf()
    await this.reload(this.config(f"http://127.0.0.1:{listener.getsockname()[1]}"))
    await this.mixed(CONNECT, each, min(this.concurrency, 100))
    for sock in (listener, *fillers):
        sock.close()
    await this.reload(this.config(url, limits={"in_flight": 1}))
    this.number += 1
    case = this.cases[this.number] = Case(this, HOLDER, this.number)
    client = await this.client(fresh=True)
    client.transport.write(case.request)
    assert await client.until(amid)
    await this.mixed(QUEUE, each, min(this.concurrency, 100))
    client.leave("fin")
    await case.upstream_closed()
    client.transport.abort()
    this.sure["client_gone"] += 1
    await this.reload(this.main)


def report(this: Soak, start: dict[str, float], end: dict[str, float], counted: collections.Counter[str]) -> bool:
    good = True
    print(f"\n{'':4} {'ending':42} {'streams':>8} {'failed':>7}")
    for kind in [*MAIN, *CONNECT, *QUEUE]:
        if this.done[kind.name]:
            bad = this.failed.get(kind.name, [])
            good = good and not bad
            print(f"{'FAIL' if bad else 'ok':4} {kind.name:42} {this.done[kind.name]:8} {len(bad):7}")
            for complaint, times in collections.Counter(bad).most_common(2):
                print(f"       {times} x {complaint[:300]}")

    print(f"\n{'':4} {'outcome':42} {'caused':>14} {'counted':>8}")
    for outcome in sorted({*this.sure, *this.perhaps, *counted}):
        least, most = this.sure[outcome], this.sure[outcome] + this.perhaps[outcome]
        well = least <= counted[outcome] <= most
        good = good and well
        caused = str(least) if least == most else f"{least}..{most}"
        print(f"{'ok' if well else 'FAIL':4} {outcome:42} {caused:>14} {counted[outcome]:8}")

    print(f"\n{'':4} {'of the process':42} {'at the start':>14} {'afterwards':>14}")
    for name in sorted({*start, *end}, key=lambda name: (name[0].isupper(), name)):
        before, after = start.get(name, 0), end.get(name, 0)
        well = after <= before + (GROWTH if name == "memory" else 0)
        if name in ("in flight", "queued", "octets held for clients", "streams listed"):
            well = after == 0
        good = good and well
        unit = "{:.1f} MiB" if name == "memory" else "{:.0f}"
        shown = [unit.format(value / (1 << 20) if name == "memory" else value) for value in (before, after)]
        print(f"{'ok' if well else 'FAIL':4} {name:42} {shown[0]:>14} {shown[1]:>14}")
    if this.aborts:
        late = sorted(this.aborts)
        middle, most = statistics.median(late) * 1e3, late[-1] * 1e3
        print(f"\n     a client's end to its upstream's, our own delays included: {middle:.1f} ms, most {most:.1f} ms")
    return good


def phases(aborted: dict[str, int]) -> bool:
    """Clients must have left in each phase, or this was no test of it."""
    print(f"\n{'':4} {'phase in which clients left':42} {'':>14} {'counted':>8}")
    for name in PHASES:
        print(f"{'ok' if aborted.get(name) else 'FAIL':4} {name:42} {'':>14} {aborted.get(name, 0):8}")
    return all(aborted.get(name) for name in PHASES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=100_000, help="beside those of the warm-up [100000]")
    parser.add_argument("--concurrency", type=int, default=200, help="[200]")
    parser.add_argument("--seed", type=int, default=1, help="[1]")
    parser.add_argument("--folder", type=Path, help="of the gateway's output [a new one, kept if it fails]")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        good = runner.run(soak(options, folder))
    if good and options.folder is None:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                os.unlink(path)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
