"""What operators meet: engines with keys, both of them dead, no descriptors left, a stop or a reload meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.integration.test_disagg_aborts import shy
from tests.support import script as s
from tests.support.disagg import Start
from tests.support.gateway import no_descriptor_left, until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, Ledger, at_rest, config, decode, engines, fetched, prefill
from tests.support.script import Script
from tests.support.tls import Certificates

UNAUTHORIZED = b'{"error":"Unauthorized"}'


def locked(key: str, script: Script) -> Script:
    """vllm serve --api-key."""

    async def asked(wire: HttpWire, request: Message) -> None:
        if request.get("authorization") == f"Bearer {key}":
            await script(wire, request)
        else:
            await s.reply(401, UNAUTHORIZED)(wire, request)

    return asked


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_key_that_an_engine_does_not_know(start_gateway: Start, side: str) -> None:
    """Its 401 is the client's, which can mend it; one that has the key is served by both."""
    async with engines() as ((p,), (d,), ledger):
        p.script, d.script = prefill(ledger), decode(ledger)
        locks = p if side == "prefill" else d
        assert locks.script is not None
        locks.script = locked("sesame", locks.script)
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask()
        assert (answer.status, answer.body, answer.get("content-type")) == (401, UNAUTHORIZED, "application/json")
        assert (len(p.requests), len(d.requests)) == ((1, 0) if side == "prefill" else (1, 1))
        (entry,) = await gateway.logged()
        assert (entry["status"], entry["outcome"]) == (401, "upstream_status")
        assert entry["backend"] == f"127.0.0.1:{locks.port}"
        answer = await gateway.ask(s.post(fields=[("Authorization", "Bearer sesame")]))
        assert answer.body == b"".join(OUTPUT)
        assert {r[-1].get("authorization") for r in (p.requests, d.requests)} == {"Bearer sesame"}
        await at_rest(gateway, ledger, p, d)
        stranded = await gateway.metric("tokenpipe_pd_stranded_total", connector="nixl")
        assert stranded == len(ledger.held) == (side == "decode")  # who turns away the request does not tell prefill of it


@pytest.mark.parametrize("status", [302, 401, 404, 413, 415, 429])
async def test_who_turns_requests_away_before_decode_has_read_them(start_gateway: Start, status: int) -> None:
    """A proxy's or a middleware's answer: nobody has told prefill to let go, so that it is asked for once more, or counted."""
    async with engines() as ((p,), (d,), ledger):
        d.script = s.in_turn(s.reply(status, b"{}", [s.JSON_TYPE, ("retry-after", "7")]), decode(ledger))
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask()
        assert (answer.status, answer.get("retry-after"), len(p.requests)) == (status, "7", 1)
        await fetched(ledger, 1)
        await at_rest(gateway, ledger, p, d)
        assert await gateway.metric("tokenpipe_pd_release_total", result="done") == 1
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 0


async def test_another_decode_where_one_is_full(start_gateway: Start) -> None:
    async with engines(1, 2) as ((p,), ds, ledger):
        ds[0].script = s.reply(429, b"{}")
        gateway = await start_gateway(config=config([p], ds, disaggregation={"hold": 1, "release_timeout": 1}))
        for _ in range(3):
            assert (await gateway.ask()).status == 200
        await at_rest(gateway, ledger, p, *ds)


async def test_keys_of_the_engines_own(start_gateway: Start, tmp_path: Path) -> None:
    """api_key_file: each leg has its backend's, the one that frees KV too."""
    async with engines() as ((p,), (d,), ledger):
        p.script, d.script = locked("p", prefill(ledger)), locked("d", s.in_turn(s.reply(422, b"{}"), decode(ledger)))
        for name in "pd":
            (tmp_path / name).write_text(name)
        listed = [
            {"url": one.url, "role": role, "api_key_file": str(tmp_path / name)}
            for one, role, name in ((p, "prefill", "p"), (d, "decode", "d"))
        ]
        given = json.loads(config([p], [d], disaggregation={"connector": "mooncake_ascend"}))
        gateway = await start_gateway(config=json.dumps({**given, "backends": listed}))
        answer = await gateway.ask(s.post(fields=[("Authorization", "Bearer mine")]))
        assert answer.status == 422
        await fetched(ledger, 1)
        await at_rest(gateway, ledger, p, d)
        assert [r.get("authorization") for r in d.requests] == ["Bearer d"] * 2


@pytest.mark.parametrize("stream", [True, False])
async def test_both_are_dead(start_gateway: Start, stream: bool) -> None:
    """Killed with an exchange in decode's hands: the client can tell, what nobody can free is counted, and then it is 503."""
    async with engines() as ((p,), (d,), ledger):
        d.script = held = s.Held(s.SSE_HEAD) if stream else s.Held()
        gateway = await start_gateway(config=config([p], [d], disaggregation={"hold": 1, "release_timeout": 1}))
        client = await gateway.connect()
        await client.send(s.post({**s.CHAT, "stream": stream}))
        await held.wire()
        for engine in (p, d):
            await engine.stop()
        answer = await client.read_response()
        client.fin()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend"), answer.body
        assert answer.get("retry-after") is not None and b"the prefill leg" in answer.body
        assert await gateway.metric("tokenpipe_pd_stranded_total", connector="nixl") == len(ledger.held) == 1
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        await at_rest(gateway, ledger, p, d)


async def test_p2p_nccl_is_not_asked_for_what_may_be_gone(start_gateway: Start) -> None:
    """Its decode waits for ever, with all that it serves, for KV that it has had: once it has been asked, no other leg follows
    under the same id, and what may lie there is counted."""
    async with engines() as ((p,), (d,), _):
        p.script, d.script = s.reply(200, b"{}"), s.in_turn(s.vanish, s.stream(*OUTPUT))
        given = json.loads(config([p], [d], disaggregation={"connector": "p2p_nccl"}))
        for backend in given["backends"]:
            backend["connector"] = {"kv_port": 9}
        gateway = await start_gateway(config=json.dumps(given))
        assert (await gateway.ask()).body == b"".join(OUTPUT)
        await at_rest(gateway, Ledger(), p, d)
        assert len({request.get("x-request-id") for request in d.requests}) == len(d.requests) == len(p.requests) == 2
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_stranded_total", connector="p2p_nccl") == 1
        assert samples.value("tokenpipe_pd_release_total") == 0


@pytest.mark.parametrize("more", [0, 1, 2])
async def test_no_descriptors(start_gateway: Start, more: int) -> None:
    """None is left for a leg: a refusal of the gateway's own, no engine is blamed, and all is as before when there are some."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d], disaggregation={"hold": 1}, pool={"idle": 0.2}))
        client = await gateway.connect()
        assert (await client.ask()).status == 200
        await asyncio.sleep(0.5)  # no kept connections
        with no_descriptor_left(gateway, spare=more):
            answer = await client.ask()
        assert (answer.status, answer.get("x-gateway-error")) in ((503, "overloaded"), (200, None)), answer.start
        assert more == 2 or answer.status == 503
        await at_rest(gateway, ledger, p, d)
        for _ in range(3):
            assert (await client.ask()).body == b"".join(OUTPUT)
        client.fin()
        assert await gateway.metric("tokenpipe_backend_failures_total") == 0
        await at_rest(gateway, ledger, p, d)


async def test_a_stop_between_the_legs(start_gateway: Start, certificates: Certificates) -> None:
    """Prefill has answered, decode takes no connection yet: the exchange is let go on to its end; nothing stays held."""
    async with engines() as ((p,), (d,), ledger), shy(certificates, p, d) as (text, go_on):
        gateway = await start_gateway(config=text, ready=False)
        stays, leaves = await gateway.connect(), await gateway.connect()
        for client in (stays, leaves):
            await client.send(s.post())
        await until(lambda: ledger.ever == 2, "the prefills")
        await asyncio.sleep(0.2)
        gateway.signal(15)
        await until(lambda: "stopping" in gateway.stderr(), "the beginning of the stop")
        leaves.reset()
        await asyncio.sleep(0.2)
        assert gateway.process.poll() is None
        go_on()
        assert (await stays.read_response()).body == b"".join(OUTPUT)
        stays.fin()
        await gateway.stopped()
        assert not ledger.held and not ledger.unknown


@pytest.mark.parametrize("gone", ["prefill", "decode"])
@pytest.mark.parametrize("phase", ["prefill", "wait", "stream"])
async def test_a_role_goes_with_exchanges_under_way(start_gateway: Start, gone: str, phase: str) -> None:
    """A reload without it: what has begun ends as it would have, release legs included; then there is nobody."""
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def slow_prefill(wire: HttpWire, request: Message) -> None:
            if phase == "prefill":
                await go_on.wait()
            await prefill(ledger)(wire, request)

        async def slow_decode(wire: HttpWire, request: Message) -> None:
            if phase == "wait":
                await go_on.wait()
            ledger.fetch(request)
            if not request.json()["stream"]:
                await s.reply(200, b"{}")(wire, request)
                return
            await wire.send(s.SSE_HEAD + s.chunk(OUTPUT[0]))
            if phase == "stream":
                await go_on.wait()
            await wire.send(b"".join(map(s.chunk, OUTPUT[1:])) + s.LAST)

        p.script, d.script = slow_prefill, slow_decode
        gateway = await start_gateway(config=config([p], [d]))
        stays, leaves = await gateway.connect(), await gateway.connect()
        for client in (stays, leaves):
            await client.send(s.post())
        await (p if phase == "prefill" else d).wait_requests(2)
        if phase == "stream":
            for client in (stays, leaves):
                await client.receive_until(b"data:")
        assert gateway.config_path is not None
        gateway.config_path.write_text(config([] if gone == "prefill" else [p], [] if gone == "decode" else [d]))
        assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 200
        leaves.reset()
        await gateway.logged(outcome="client_gone")
        answer = await gateway.ask()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        go_on.set()
        if phase != "stream":
            assert (await stays.read_response()).body == b"".join(OUTPUT)
        else:
            assert OUTPUT[-1] in await stays.receive_until(s.LAST)
        stays.fin()
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held
        stays_on = d if gone == "prefill" else p
        async with asyncio.timeout(5):
            while [one["url"] for one in (await gateway.admin(s.get("/-/backends"))).json()] != [stays_on.url]:
                await asyncio.sleep(0.02)
