"""What the operator did not set does not change the traffic: a hostile environment, and limits of the process."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import Fields, HttpWire, Message
from tests.support.upstream import RawUpstream, running
from tests.support.wire import Closed

Start = Callable[..., Awaitable[Gateway]]


@contextlib.asynccontextmanager
async def hostile(folder: Path) -> AsyncIterator[tuple[dict[str, str], RawUpstream]]:
    """An environment that tries everything, and the proxy that it names, which nobody may ask."""
    netrc = folder / ".netrc"
    netrc.write_text("machine 127.0.0.1 login evil password evil\ndefault login evil password evil\n")
    netrc.chmod(0o600)
    async with running() as proxy:
        names = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "ws_proxy")
        yield {
            **dict.fromkeys(names, proxy.url), "NO_PROXY": "", "no_proxy": "", "NETRC": str(netrc), "HOME": str(folder),
            "TZ": "Asia/Kathmandu", "LANG": "C", "LC_ALL": "C", "LANGUAGE": "tr", "PYTHONIOENCODING": "ascii",
            "PYTHONUTF8": "0", "PYTHONASYNCIODEBUG": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "1",
            "PYTHONOPTIMIZE": "2", "REQUEST_METHOD": "GET", "SSL_CERT_FILE": "/nonexistent", "PORT": "1", "HOST": "x",
            "OPENAI_API_KEY": "sk-evil", "OPENAI_BASE_URL": proxy.url, "MALLOC_PERTURB_": "85",
        }, proxy  # fmt: skip


TRAFFIC = [
    s.post(),
    s.post({**s.CHAT, "stream": False}),
    s.post(b'{"a": "\xc3\xa9 \xff", "model":"m"}', "/v1/other", [("X-Latin", "caf\xe9"), ("X-A", "1"), ("X-A", "2")]),
    s.get("/v1/encoded%2520path?a=%2F&b=c;d"),
    s.get("/v1/%C4%B0/x", [("Cookie", "sid=1"), ("Accept", "a"), ("Accept", "b")]),
    s.get("/v1/x", method="HEAD"),
    s.post(b"", "/v1/empty"),
    s.get("/v1/%2e%2e/admin"),
    s.get("/metrics"),
    s.get("//v1/x"),
]


OWN = {"x-request-id", "date", "x-forwarded-for", "host", "forwarded"}  # may differ from run to run


def plain(fields: Fields) -> list[tuple[str, str]]:
    return [(k, v) for k, v in fields if k.lower() not in OWN]


async def seen(gateway: Gateway, upstream: RawUpstream) -> list[Any]:
    """What client and backend see of the same traffic."""

    async def script(wire: HttpWire, request: Message) -> None:
        cookie = [("set-cookie", "sid=A; Path=/"), ("set-cookie", "b=2"), s.JSON_TYPE]
        await s.reply(200, "é\ud83d".encode("utf-8", "surrogatepass"), cookie)(wire, request)

    upstream.script = script
    found: list[Any] = []
    for request in TRAFFIC:
        before = len(upstream.requests)
        answer = await gateway.ask(request)
        found.append((answer.start, plain(answer.fields), answer.body if answer.status == 200 else b""))
        found += [(r.start, plain(r.fields), r.body) for r in upstream.requests[before:]]
    return found


async def test_a_hostile_environment(start_gateway: Start, upstream: RawUpstream, tmp_path: Path) -> None:
    """The same traffic gives the same octets; no proxy, no credentials, no cookies of others, no other clock."""
    clean = await start_gateway(config={}, backends=[upstream.url])
    expected = await seen(clean, upstream)
    async with hostile(tmp_path) as (environment, proxy):
        gateway = await start_gateway(config={}, backends=[upstream.url], environment=environment)
        assert await seen(gateway, upstream) == expected
        assert not proxy.connections
    everything = b"".join(bytes(wire.received) for wire in upstream.connections).lower()
    assert b"evil" not in everything
    assert b"proxy-" not in everything
    cookies = [r.get("cookie") for r in upstream.requests]
    assert [c for c in cookies if c] == ["sid=1"] * 2
    assert (await gateway.logged())[-1]["time"].endswith("Z")
    for name in ("/health", "/v1/models"):
        assert name in upstream.probed


@pytest.mark.parametrize("flag", ["PYTHONASYNCIODEBUG", "PYTHONDEVMODE", "PYTHONMALLOC", "PYTHONNODEBUGRANGES"])
async def test_python_flags(start_gateway: Start, upstream: RawUpstream, flag: str) -> None:
    """Flags of the interpreter slow it down at most."""
    value = "debug" if flag == "PYTHONMALLOC" else "1"
    gateway = await start_gateway(config={}, backends=[upstream.url], environment={flag: value})
    upstream.script = s.stream(s.delta("a"), *s.FINISHED)
    answers = await asyncio.gather(*(gateway.ask() for _ in range(20)))
    assert all(a.complete for a in answers)
    client = await gateway.connect()
    upstream.script = held = s.Held(s.SSE_HEAD)
    await client.send(s.post())
    wire = await held.wire()
    client.fin()
    await wire.wait_closed(1)


async def test_without_aiohttps_c_parser(tmp_path: Path, upstream: RawUpstream) -> None:
    """AIOHTTP_NO_EXTENSIONS is refused at the start, in words."""
    with pytest.raises(AssertionError, match="AIOHTTP_NO_EXTENSIONS"):
        await Gateway.start(tmp_path, config={}, backends=[upstream.url], environment={"AIOHTTP_NO_EXTENSIONS": "1"})


@pytest.mark.seconds(60)
async def test_few_descriptors(start_gateway: Start, upstream: RawUpstream) -> None:
    """At the limit of 64, with a hundred clients: it lives, its streams go on, and it serves again when some leave."""
    gateway = await start_gateway(config={}, backends=[upstream.url])
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (64, 64))
    upstream.script = held = s.Held(s.SSE_HEAD, s.chunk(s.delta("a")))
    stream = await gateway.connect()
    await stream.send(s.post(fields=[("X-Request-Id", "stream")]))
    wire = await held.wire()
    upstream.script = s.reply()
    clients: list[RawClient] = []
    for _ in range(100):
        clients.append(await gateway.connect())
        with contextlib.suppress(ConnectionError):
            await clients[-1].send(s.post())
    await wire.send(s.chunk(s.delta("b")))
    await stream.receive_until(s.delta("b"))

    async def outcome(client: RawClient) -> str:
        try:
            answer = await client.read_response(timeout=1.0)
        except TimeoutError:
            return "waits"
        except Exception:
            return "closed"
        return str(answer.status)

    outcomes = await asyncio.gather(*map(outcome, clients))
    print({kind: outcomes.count(kind) for kind in set(outcomes)})
    assert set(outcomes) <= {"200", "503", "waits", "closed"}
    lines, cpu = len(gateway.lines()), _cpu(gateway.pid)
    await asyncio.sleep(0.5)
    assert len(gateway.lines()) - lines < 100
    assert _cpu(gateway.pid) - cpu < 0.3, "it spins"
    for client in clients[:80]:
        client.reset()
    began = time.monotonic()
    while True:
        with contextlib.suppress(Exception):
            if (await gateway.ask(timeout=1)).status == 200:
                break
        assert time.monotonic() - began < 5, "it serves no more"
        await asyncio.sleep(0.05)
    took = time.monotonic() - began
    print(f"serves again after {took:.2f} s")
    assert took < 1.5
    for client in clients[80:]:
        client.reset()
    await wire.send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
    assert (await stream.read_response()).complete
    stream.fin()
    assert len(gateway.lines()) < 600


async def test_few_descriptors_from_the_start(start_gateway: Start, upstream: RawUpstream) -> None:
    """Started with 64 of them: whoever cannot be served is told so with a 503, and nobody is cut off without a word."""
    gateway = await start_gateway(config={}, backends=[upstream.url], descriptors=64)
    clients = [await gateway.connect() for _ in range(28)]

    async def ask(client: RawClient) -> str:
        try:
            return str((await client.ask(timeout=3)).status)
        except Exception as error:
            return type(error).__name__

    outcomes = await asyncio.gather(*map(ask, clients))
    print({kind: outcomes.count(kind) for kind in set(outcomes)})
    for client in clients:
        client.reset()
    assert "503" in outcomes and set(outcomes) <= {"200", "503"}
    assert sum("16 clients are connected" in line for line in gateway.lines()) == 1  # once, not for each


async def test_clients_leave_descriptors_to_operators(start_gateway: Start, upstream: RawUpstream) -> None:
    """More of them than there may ever be descriptors for, who say nothing and stay: the admin listener is not theirs."""
    gateway = await start_gateway(config={}, backends=[upstream.url], descriptors=64)
    clients = [await gateway.connect() for _ in range(100)]
    async with asyncio.timeout(10):
        while not any("clients are connected" in line for line in gateway.lines()):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    for _ in range(3):
        assert (await gateway.admin(s.get("/livez"))).status == 200
    assert gateway.fds() < 64
    for client in clients:
        client.reset()
    async with asyncio.timeout(10):
        status = 0
        while status != 200:
            with contextlib.suppress(Closed, ConnectionError):
                status = (await gateway.ask()).status


def _cpu(pid: int) -> float:
    """Seconds of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def test_a_locale_that_is_not_there(start_gateway: Start, upstream: RawUpstream) -> None:
    """Names beyond ASCII in what clients send are logged all the same, escaped."""
    environment = {"LC_ALL": "xx_XX", "PYTHONUTF8": "0"}
    gateway = await start_gateway(config={}, backends=[upstream.url], environment=environment)
    await gateway.ask(s.post({**s.CHAT, "model": "モデル"}, fields=[("X-Request-Id", "name")]))
    (entry,) = await gateway.logged(request_id="name")
    assert entry["model"] == "モデル"


async def test_the_working_directory_is_nobodys(start_gateway: Start, upstream: RawUpstream) -> None:
    """Files are not served, whatever the path looks like."""
    gateway = await start_gateway(config={}, backends=[upstream.url])
    paths = ("/setup.cfg", "/static/../../../../etc/passwd", "/..%2f..%2fetc/passwd", "/v1/models%00.html", "/.env")
    for path in paths:
        answer = await gateway.ask(s.get(path))
        assert answer.status in (400, 404), path
        assert answer.json()["error"]["code"] in ("bad_request", "unknown_path")
    assert not upstream.requests
