"""Backends that come and go, over a real gateway: from files, DNS and Kubernetes; and what a reload makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import dns.rcode
import pytest

from tests.support import script as s
from tests.support.dns import DnsServer, dns_server
from tests.support.gateway import Gateway, until
from tests.support.kubernetes import NAMESPACE, SERVICE, endpoint, endpoint_slice, kubernetes_api
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream, listening_socket

Start = Callable[..., Awaitable[Gateway]]
QUICK = 0.1  # seconds between look-ups
SLOW = {"interval": 60, "slow_start": 0}


@contextlib.asynccontextmanager
async def upstreams(*hosts: str, same_port: bool = True) -> AsyncIterator[list[RawUpstream]]:
    """Backends on these addresses of the loopback interface, all on one port as the pods of a service are."""
    backends: list[RawUpstream] = []
    try:
        for host in hosts:
            backend = RawUpstream()
            port = backends[0].port if backends and same_port else 0
            await backend.start(listening_socket(host, port))
            backend.url = f"http://{host}:{backend.port}"
            backends.append(backend)
        yield backends
    finally:
        for backend in backends:
            await backend.stop()


async def listed(gateway: Gateway) -> dict[str, str]:
    return {b["name"]: b["state"] for b in (await gateway.admin(s.get("/-/backends"))).json()}


async def reached(gateway: Gateway, *names: str, **states: str) -> None:
    """Wait until these are all there are, and until those say so of themselves."""
    async with asyncio.timeout(5):
        while True:
            found = await listed(gateway)
            if set(found) == {*names, *states} and states.items() <= found.items():
                return
            await asyncio.sleep(0.02)


async def stream(gateway: Gateway, request_id: str) -> Any:
    client = await gateway.connect()
    await client.send(s.post(fields=[("X-Request-Id", request_id)]))
    return client


def write(path: Path, content: object) -> None:
    other = path.with_name(path.name + ".new")
    other.write_text(json.dumps(content))
    other.rename(path)


def of(*backends: RawUpstream) -> list[dict[str, Any]]:
    return [{"url": backend.url} for backend in backends]


def names(*backends: RawUpstream) -> list[str]:
    return [backend.url.removeprefix("http://") for backend in backends]


class TestFile:
    async def test_followed(self, start_gateway: Start, tmp_path: Path) -> None:
        """A backend that comes is used; one that goes gets nothing new, keeps its stream, and is gone with it; one that
        stays keeps its connection. A bad file changes nothing."""
        async with upstreams("127.0.0.1", "127.0.0.2", "127.0.0.3") as (stays, goes, comes):
            path = tmp_path / "backends.json"
            write(path, of(stays, goes))
            gateway = await start_gateway(
                config={"discovery": {"file": str(path), "interval": QUICK}, "health": SLOW, "balance": "round_robin",
                        "pool": {"idle": 60}}, ready=False
            )  # fmt: skip
            await reached(gateway, *names(stays, goes))  # at once: it was read before the gateway listened
            goes.script = held = s.Held(s.SSE_HEAD)
            assert (await gateway.ask()).status == 200
            client = await stream(gateway, "held")
            wire = await held.wire()
            (kept,) = [w for w in stays.wires if not w.ended]

            write(path, of(stays, comes))
            gone = names(goes)[0]
            await reached(gateway, *names(stays, comes), **{gone: "draining"})
            samples = await gateway.metrics()
            assert samples.value("tokenpipe_backend_state", backend=gone, state="draining") == 1
            assert samples.value("tokenpipe_backend_up", backend=gone) == 0
            assert samples.value("tokenpipe_backend_in_flight", backend=gone) == 1
            assert {(await gateway.ask()).status for _ in range(6)} == {200}
            assert (len(goes.requests), len(comes.requests)) == (1, 3)
            assert {id(w) for w in stays.wires} == {id(kept)}

            path.write_text("[{")
            await until(lambda: "not valid YAML" in gateway.stderr(), "a word of it")
            assert (await gateway.ask()).status == 200

            await wire.send(s.chunk(s.delta("a")) + b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
            assert (await client.read_response()).complete
            client.fin()
            await reached(gateway, *names(stays, comes))
            assert await gateway.metric("tokenpipe_requests_in_flight") == 0
            assert not (await gateway.metrics()).has("tokenpipe_backend_state", backend=gone)
            await wire.wait_closed()  # nobody keeps its connection

    async def test_none_at_first(self, start_gateway: Start, tmp_path: Path) -> None:
        """It starts, is not ready, says why, and serves as soon as there is one. No synthetic engine stands in."""
        async with upstreams("127.0.0.1") as (backend,):
            path = tmp_path / "backends.json"
            gateway = await start_gateway(
                config={"discovery": {"file": str(path), "interval": QUICK}}, ready=False
            )
            assert "cannot be read (No such file or directory)" in gateway.stderr()
            assert (await gateway.admin(s.get("/readyz"))).status == 503
            answer = await gateway.ask()
            assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
            assert await listed(gateway) == {}
            write(path, [{"targets": names(backend), "labels": {"job": "vllm"}}])
            await reached(gateway, *names(backend))
            assert (await gateway.ask()).status == 200


class TestDns:
    @pytest.fixture
    async def server(self) -> AsyncIterator[DnsServer]:
        async with dns_server() as server:
            yield server

    async def test_a_name_that_moves(self, start_gateway: Start, server: DnsServer) -> None:
        """Under load: no request fails, kept connections to the address that has gone are closed, its stream ends well,
        and a DNS server that fails changes nothing."""
        async with upstreams("127.0.0.1", "127.0.0.2", "127.0.0.3") as (one, two, three):
            server.records["vllm.test", "A"] = ["127.0.0.1", "127.0.0.2"]
            lookup = {"names": "vllm.test", "port": one.port, "servers": f"127.0.0.1:{server.port}"}
            gateway = await start_gateway(
                config={"discovery": {"dns": lookup, "interval": QUICK}, "health": SLOW, "pool": {"idle": 60}}, ready=False
            )
            await reached(gateway, *names(one, two))
            held = s.Held(s.SSE_HEAD)
            one.script, two.script = s.in_turn(held, s.reply()), s.in_turn(held, s.reply())
            clients = [await stream(gateway, f"held-{n}") for n in range(2)]
            await held.wire(1)
            statuses, done = [], asyncio.Event()

            async def load() -> None:
                while not done.is_set():
                    statuses.append((await gateway.ask()).status)

            loads = [asyncio.create_task(load()) for _ in range(4)]
            await two.wait_requests(3)
            server.records["vllm.test", "A"] = ["127.0.0.1", "127.0.0.3"]
            await reached(gateway, *names(one, three), **{names(two)[0]: "draining"})
            asked = len(two.requests)
            await until(lambda: len(two.open_connections) == 1, "its kept connections to be closed")
            await three.wait_requests(10)
            server.rcode = dns.rcode.SERVFAIL
            await until(lambda: "could not be looked up" in gateway.stderr(), "a word of it")
            await three.wait_requests(20)
            done.set()
            await asyncio.gather(*loads)
            assert set(statuses) == {200}
            assert len(two.requests) == asked
            assert two.requests[0].get("host") == f"vllm.test:{one.port}"
            for wire in held.wires:
                await wire.send(s.chunk(s.delta("a")) + b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
            assert all([(await client.read_response()).complete for client in clients])
            for client in clients:
                client.fin()
            await reached(gateway, *names(one, three))
            gateway.check_tidy()

    async def test_services_over_tls(
        self, start_gateway: Start, server: DnsServer, certificates: Certificates
    ) -> None:
        """SRV: the port is the record's, the certificate must be the target's, and probes go the same way."""
        backend = RawUpstream()
        await backend.start(tls=certificates.server_context())
        try:
            server.records["_vllm._tcp.test", "SRV"] = [f"0 1 {backend.port} localhost.", f"0 1 {backend.port} other.test."]
            server.records["localhost", "A"] = server.records["other.test", "A"] = ["127.0.0.1"]
            found = {"names": "_vllm._tcp.test", "type": "SRV", "servers": f"127.0.0.1:{server.port}", "scheme": "https",
                     "tls": {"ca": str(certificates.ca)}}  # fmt: skip
            gateway = await start_gateway(
                config={"discovery": {"dns": found, "interval": QUICK},
                        "health": {"interval": 0.1, "fail": 1, "pass": 1}}, ready=False
            )  # fmt: skip
            await reached(gateway, **{f"localhost:{backend.port}": "up", f"other.test:{backend.port}": "down"})
            assert (await gateway.ask()).status == 200
            assert backend.requests[0].get("host") == f"localhost:{backend.port}"
        finally:
            await backend.stop()


async def test_kubernetes(start_gateway: Start, certificates: Certificates, tmp_path: Path) -> None:
    """Pods of a service: a rollout under load, with the API's token replaced and its memory cut short."""
    async with (
        kubernetes_api(certificates.server_context()) as api,
        upstreams("127.0.0.1", "127.0.0.2", "127.0.0.3") as (one, two, three),
    ):
        (tmp_path / "token").write_text("token-1")
        ports: list[tuple[str | None, int]] = [("http", one.port)]

        def pods(*numbers: int, leaving: int | None = None) -> dict[str, Any]:
            ready = [endpoint(f"127.0.0.{n}", f"vllm-{n}") for n in numbers]
            going = [] if leaving is None else [
                endpoint(f"127.0.0.{leaving}", f"vllm-{leaving}", ready=False, terminating=True)]  # fmt: skip
            return endpoint_slice("vllm-abc", *ready, *going, ports=ports)

        def named(number: int) -> str:
            return f"vllm-{number}.{NAMESPACE}:{one.port}"

        api.put(pods(1, 2))
        service = {"service": SERVICE, "namespace": NAMESPACE, "port": "http", "server": api.url,
                   "token_file": "token", "ca": str(certificates.ca)}  # fmt: skip
        config = tmp_path / "tokenpipe.yaml"
        config.write_text(json.dumps({"discovery": {"kubernetes": service}, "health": SLOW}))
        gateway = await start_gateway(flags=["-c", str(config)], ready=False)
        await reached(gateway, named(1), named(2))
        await until(lambda: bool(api.watches), "the watch")
        held = s.Held(s.SSE_HEAD)
        one.script, two.script = s.in_turn(held, s.reply()), s.in_turn(held, s.reply())
        clients = [await stream(gateway, f"held-{n}") for n in range(2)]
        await held.wire(1)
        api.put(pods(1, 3, leaving=2))
        await reached(gateway, named(1), named(3), **{named(2): "draining"})
        before = len(two.requests)
        assert {(await gateway.ask()).status for _ in range(8)} == {200}
        assert len(two.requests) == before
        assert three.requests

        (tmp_path / "token").write_text("token-2")
        api.tokens = {"token-2"}
        api.put(pods(1))
        await reached(gateway, named(1), **{named(2): "draining"})
        api.compact()
        api.cut_watches()
        api.put(pods(3))
        await reached(gateway, named(3), **{named(1): "draining", named(2): "draining"})
        assert api.used[-1] == "token-2"
        for wire in held.wires:
            await wire.send(s.chunk(s.delta("a")) + b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
        assert all([(await client.read_response()).complete for client in clients])
        for client in clients:
            client.fin()
        await reached(gateway, named(3))
        assert (await gateway.ask()).status == 200


class TestReload:
    async def reload(self, gateway: Gateway, config: dict[str, Any]) -> tuple[int, str]:
        assert gateway.config_path
        gateway.config_path.write_text(json.dumps(config))
        answer = await gateway.admin(s.get("/-/reload", method="POST"))
        return answer.status, answer.body.decode()

    async def test_sources_together(self, start_gateway: Start, tmp_path: Path) -> None:
        """Static, discovered and added ones stand side by side; each reload changes what it says, and nothing else; a
        source that cannot be read refuses the reload whole."""
        async with upstreams("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4") as (static, found, added, other):
            path = tmp_path / "found.json"
            write(path, of(found, static))
            config: dict[str, Any] = {"backends": of(static), "health": SLOW, "pool": {"idle": 60},
                                      "discovery": {"file": str(path), "interval": QUICK}}  # fmt: skip
            gateway = await start_gateway(config=config)
            assert "is taken by a backend of configuration" in gateway.stderr()
            assert (await gateway.admin(s.post({"url": added.url}, "/-/backends"))).status == 201
            await reached(gateway, *names(static, found, added))
            assert {(await gateway.ask()).status for _ in range(6)} == {200}
            before = [len(b.wires) for b in (found, added)]
            assert all(before)

            assert (await self.reload(gateway, {**config, "backends": of(other)}))[0] == 200
            await reached(gateway, *names(other, found, static, added))  # the file's is not left out any more
            sources = {b["name"]: b["source"] for b in (await gateway.admin(s.get("/-/backends"))).json()}
            assert sources == dict(
                zip(names(other, found, static, added), ["configuration", *[f"file {path}"] * 2, "admin API"], strict=True)
            )
            assert {(await gateway.ask()).status for _ in range(12)} == {200}
            for backend in (found, added):
                assert len({id(wire) for wire in backend.wires}) == 1  # the connection is still the first one

            missing = {**config, "discovery": {"file": [str(path), str(tmp_path / "missing.json")]}}
            status, text = await self.reload(gateway, missing)
            assert status == 400
            assert "cannot be read (No such file or directory)" in text
            await reached(gateway, *names(other, found, static, added))

            del config["discovery"]
            assert (await self.reload(gateway, config))[0] == 200
            await reached(gateway, *names(static, added))
            write(path, of(other))
            assert {(await gateway.ask()).status for _ in range(4)} == {200}
            await reached(gateway, *names(static, added))
            assert await gateway.metric("tokenpipe_config_reloads_total", result="success") == 2
