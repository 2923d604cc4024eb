"""The admin API's part in who the backends are: adding, draining, removing, and the names that vLLM Ascend's proxy has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_fleet import fleet, refusing, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway, until
from tests.support.messages import Message
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
SLOW = {"interval": 60, "slow_start": 0}
PREFILLED = json.dumps({
    "choices": [{"index": 0, "finish_reason": "length"}],
    "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e",
                            "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1,
                            "remote_block_ids": [[1]]},
}).encode()  # fmt: skip


def add(**backend: Any) -> bytes:
    return s.post(backend, "/-/backends")


def delete(name: str) -> bytes:
    return s.get(f"/-/backends/{name}", method="DELETE")


def drain(name: str) -> bytes:
    return s.get(f"/-/backends/{name}/drain", method="POST")


def instances(what: str, **content: Any) -> bytes:
    return s.post(content, f"/instances/{what}")


def place(backend: RawUpstream) -> str:
    return f"127.0.0.1:{backend.port}"


async def names(gateway: Gateway) -> list[str]:
    return [b["name"] for b in await states(gateway)]


async def finish(wire: Any, client: Any) -> Message:
    await wire.send(s.chunk(s.delta("a")) + b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
    answer: Message = await client.read_response()
    assert answer.complete
    client.fin()
    return answer


async def test_add_and_remove(start_gateway: Start) -> None:
    """A backend that was added is used at once; one that was removed, not any more. What is said twice holds once."""
    async with fleet(2) as (one, two):
        gateway = await start_gateway(config={"health": SLOW}, backends=[one.url])
        answer = await gateway.admin(add(url=two.url, name="two", weight=3, max_in_flight=5))
        assert answer.status == 201
        expected = {"name": "two", "url": two.url, "source": "admin API", "role": "both", "weight": 3, "max_in_flight": 5}
        assert expected.items() <= answer.json().items()
        assert (await gateway.admin(add(url=two.url, name="two"))).status == 200
        assert await names(gateway) == [place(one), "two"]
        assert {(await gateway.ask()).status for _ in range(4)} == {200}
        assert len(two.requests) == 2
        assert (await gateway.admin(delete("two"))).status == 204
        assert await names(gateway) == [place(one)]
        assert {(await gateway.ask()).status for _ in range(4)} == {200}
        assert len(two.requests) == 2
        assert (await gateway.admin(delete("two"))).status == 404
        assert "new: two (admin API)" in gateway.stderr()


@pytest.mark.parametrize("ask", [drain, delete])
async def test_drain(start_gateway: Start, ask: Callable[[str], bytes]) -> None:
    """No new request; what is under way goes on to its end, and with the last of it the backend is gone: of the list, and
    of the metrics."""
    async with fleet(2) as (one, two):
        held = s.Held(s.SSE_HEAD)
        gateway = await start_gateway(config={"health": SLOW}, backends=urls([one, two]))
        one.script = two.script = held
        clients = [await gateway.connect() for _ in range(4)]
        for number, client in enumerate(clients):
            await client.send(s.post())
            await held.wire(number)
        one.script = two.script = s.reply()
        answer = await gateway.admin(ask(place(one)))
        assert answer.status == 202
        assert {"name": place(one), "state": "draining", "in_flight": 2}.items() <= answer.json().items()
        assert {(await gateway.ask()).status for _ in range(5)} == {200}
        assert (len(one.requests), len(two.requests)) == (2, 7)
        assert [(b["name"], b["state"]) for b in await states(gateway)][1] == (place(one), "draining")
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_backend_state", backend=place(one), state="draining") == 1
        assert samples.value("tokenpipe_requests_in_flight", backend=place(one)) == 2
        assert (await gateway.admin(ask(place(one)))).status == 202  # said twice
        of_one = [n for n, wire in enumerate(held.wires) if wire in one.wires]
        await finish(held.wires[of_one[0]], clients[of_one[0]])
        await gateway.logged(6, outcome="complete")
        assert len(await states(gateway)) == 2
        await finish(held.wires[of_one[1]], clients[of_one[1]])
        async with asyncio.timeout(5):
            while len(await states(gateway)) > 1:
                await asyncio.sleep(0.01)
        assert not (await gateway.metrics()).has("tokenpipe_backend_state", backend=place(one))
        assert "is gone: its last exchange has ended" in gateway.stderr()
        assert (await gateway.admin(ask(place(one)))).status == 404
        for number in set(range(4)) - set(of_one):
            await finish(held.wires[number], clients[number])


async def test_a_drain_outlives_a_reload_and_is_taken_back(start_gateway: Start) -> None:
    """The configuration lists it still: it stays out until it is added again."""
    async with fleet(2) as (one, two):
        gateway = await start_gateway(config={"health": SLOW}, backends=urls([one, two]))
        answer = await gateway.admin(drain(place(one)))
        assert (answer.status, answer.json()["state"]) == (200, "gone")
        assert (await gateway.admin(s.get("/-/reload", method="POST"))).status == 200
        assert await names(gateway) == [place(two)]
        answer = await gateway.admin(add(url=one.url))
        assert (answer.status, answer.json()["source"]) == (201, "configuration")
        assert await names(gateway) == [place(one), place(two)]


async def test_the_last_one_drains(start_gateway: Start) -> None:
    """Then there is nobody: 503 with a word of why, not ready; and a request that waits for a place is told, too."""
    async with fleet(1) as (one,):
        config = {"backends": [{"url": one.url, "max_in_flight": 1}], "health": SLOW}
        gateway = await start_gateway(config=config)
        one.script = held = s.Held(s.SSE_HEAD)
        first, second = await gateway.connect(), await gateway.connect()
        await first.send(s.post())
        wire = await held.wire()
        await second.send(s.post())
        async with asyncio.timeout(5):
            while await gateway.metric("tokenpipe_queue_depth") != 1:
                await asyncio.sleep(0.01)
        assert (await gateway.admin(drain(place(one)))).status == 202
        answer = await second.read_response()
        assert (answer.status, answer.get("x-gateway-error")) == (503, "no_backend")
        assert "there is none" in answer.body.decode()
        assert (await gateway.admin(s.get("/readyz"))).status == 503
        await finish(wire, first)
        second.fin()


async def test_what_is_refused(start_gateway: Start, tmp_path: Path) -> None:
    """Each with what was found and what is expected; and nothing has changed."""
    secret = tmp_path / "secret"
    secret.write_text("hush")
    async with fleet(1) as (one,):
        gateway = await start_gateway(
            config={"health": SLOW}, backends=[one.url], environment={"HUSH": "hushhush"}
        )
        with refusing() as other:
            for request, status, expected in (
                (s.post(b"{", "/-/backends"), 400, "the body: not valid JSON"),
                (s.post(b"[]", "/-/backends"), 400, "the body: found no JSON object"),
                (add(name="x"), 400, "the body: url: found nothing; expected a value"),
                (add(url="10.0.0.1"), 400, "the body: url: found '10.0.0.1'; expected http://HOST[:PORT]"),
                (add(url=other, wieght=2), 400, "wieght: unknown key; the nearest known key is weight"),
                (add(url=other, name="${HUSH}"), 400, "the body: name: found '${HUSH}'; expected a name"),
                (add(url=other, api_key_file=str(secret)), 400, "api_key_file: found the name of a file; expected none"),
                (add(url=other, tls={"ca": str(secret)}), 400, "tls.ca: found the name of a file; expected none"),
                (add(url=other, role="prefil"), 400, "role: found 'prefil'; expected both, prefill, decode or encode"),
                (add(url=other, name=place(one)), 409, f"{place(one)} is at {one.url}: remove it first"),
                (add(url=one.url, name="again"), 409, f"{place(one)} is at {one.url}: remove it first"),
                (drain("nobody"), 404, "there is no backend nobody; GET /-/backends names them"),
                (instances("add", type="both", instances="a:1"), 400, "type: found 'both'; expected prefill or decode"),
                (instances("add", instances="a:1"), 400, "type: found nothing; expected prefill or decode"),
                (instances("add", type=["prefill"], instances="a:1"), 400, "type: found \"['prefill']\"; expected prefill or"),
                (instances("remove", type={}, instances="a:1"), 400, "type: found '{}'; expected prefill or decode"),
                (s.post({}, "/instances/add", [("content-encoding", "gzip")]), 400, "type: found nothing"),
                (s.post(b"\x1f\x8b", "/-/backends", [("content-encoding", "gzip")]), 400, "the body: not valid JSON"),
                (instances("add", type="decode"), 400, "instances: expected HOST:PORT, or a list"),
                (instances("add", type="decode", instances=["a"]), 400, "found 'a'; expected HOST:PORT, an IPv6 address in"),
                (instances("add", type="decode", instances="[::1]"), 400, "found '[::1]'; expected HOST:PORT"),
                (instances("add", type="decode", instances="::1:80"), 400, "'http://::1:80'; expected http://HOST[:PORT]"),
                (instances("add", type="decode", instances=["a:1", "b:x"]), 400, "url: found 'http://b:x'"),
                (instances("remove", type="decode", instances="a:1"), 404, "none of these is a decode instance"),
            ):
                answer = await gateway.admin(request)
                assert (answer.status, expected in answer.json()["error"]["message"]) == (status, True), answer.body
                assert b"hushhush" not in answer.body
        assert await names(gateway) == [place(one)]


async def test_a_backend_of_which_the_connector_must_know_more(start_gateway: Start, tmp_path: Path) -> None:
    """It is not taken in, whoever names it, instead of failing every request that it would get."""
    listed = tmp_path / "backends.json"
    listed.write_text("[]")
    async with fleet(2) as (one, two):
        known = [{"url": one.url}, {"url": two.url, "role": "decode", "connector": {"kv_port": 9}}]
        text = {"disaggregation": {"connector": "p2p_nccl"}, "discovery": {"file": str(listed), "interval": 0.1}}
        gateway = await start_gateway(config={"health": SLOW, "backends": known, **text})
        missing = "connector.kv_port: found nothing; expected a port, for connector p2p_nccl"
        for request in (
            add(url="http://127.0.0.1:9", role="decode"), instances("add", type="prefill", instances="127.0.0.1:9")
        ):
            answer = await gateway.admin(request)
            assert (answer.status, missing in answer.json()["error"]["message"]) == (400, True), answer.body
        listed.write_text(json.dumps([{"url": "http://127.0.0.1:9", "role": "prefill"}]))
        await until(lambda: f"backends[0].{missing}" in gateway.stderr(), "a complaint about the file")
        assert await names(gateway) == [place(one), place(two)]
        answer = await gateway.admin(add(url="http://127.0.0.1:9", role="decode", connector={"kv_port": 9}))
        assert answer.status == 201
        for what in ("remove", "add"):  # one that is listed comes back as it is described there
            assert (await gateway.admin(instances(what, type="decode", instances=place(two)))).status == 200
        assert await names(gateway) == [place(one), place(two), "127.0.0.1:9"]


async def test_a_page_of_another_site_cannot(start_gateway: Start) -> None:
    async with fleet(1) as (one,):
        gateway = await start_gateway(config={"health": SLOW}, backends=[one.url])
        for path in ("/-/backends", "/instances/add"):
            answer = await gateway.admin(s.post({"url": "http://evil"}, path, [("Origin", "http://evil.test")]))
            assert answer.status == 403
        assert await names(gateway) == [place(one)]


async def test_the_synthetic_engine_makes_way(start_gateway: Start) -> None:
    """Nobody is to get its words once there is a real backend, nor when that one has gone."""
    async with fleet(1) as (one,):
        gateway = await start_gateway(config={"health": SLOW})
        assert await names(gateway) == ["synthetic"]
        assert (await gateway.admin(add(url=one.url))).status == 201
        assert await names(gateway) == [place(one)]
        assert (await gateway.ask()).status == 200
        assert len(one.requests) == 1
        assert (await gateway.admin(delete(place(one)))).status == 204
        assert (await gateway.ask()).get("x-gateway-error") == "no_backend"


async def test_instances(start_gateway: Start) -> None:
    """The requests and the answers of vLLM Ascend's proxy. An engine that only prefills gets no whole request."""
    async with fleet(3) as (one, two, three):
        gateway = await start_gateway(config={"health": SLOW}, backends=[one.url])
        answer = await gateway.admin(instances("add", type="decode", instances=[place(two)]))
        assert (answer.status, answer.json()) == (200, {
            "message": f"add decode instances: ['{place(two)}'].",
            "current_prefill_instances": [place(one)],
            "current_decode_instances": [place(one), place(two)],
        })  # fmt: skip
        three.script = s.reply(200, PREFILLED)
        answer = await gateway.admin(instances("add", type="prefill", instances=place(three)))
        assert answer.json()["current_prefill_instances"] == [place(one), place(three)]
        two.script = held = s.Held(s.SSE_HEAD)
        clients = [await gateway.connect() for _ in range(2)]
        for number, client in enumerate(clients):
            await client.send(s.post())
            await held.wire(number)
        wire = await held.wire(0)
        health = await gateway.admin(s.get("/healthcheck"))
        assert health.body == b'{"status":"ok","prefill_instances":2,"decode_instances":2,"request_num":2}'
        await wire.send(s.chunk(s.delta("a")))
        assert (await clients[0].read_response_head()).status == 200
        assert (len(one.requests), len(two.requests), len(three.requests)) == (0, 2, 2)
        answer = await gateway.admin(instances("remove", type="decode", instances=[place(two), "nobody:1"]))
        assert answer.json()["message"] == f"remove decode instances: ['{place(two)}']."
        assert answer.json()["current_decode_instances"] == [place(one)]
        assert {b["name"]: b["state"] for b in await states(gateway)}[place(two)] == "draining"
        for wire in (await held.wire(0), await held.wire(1)):
            await wire.send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
        assert (await gateway.admin(instances("remove", type="prefill", instances=place(one)))).status == 200  # of the file
        assert (await gateway.ask()).get("x-gateway-error") == "no_backend"
        await until(lambda: "is gone" in gateway.stderr(), "the end of its stream")
        assert [(b["name"], b["role"]) for b in await states(gateway)] == [(place(three), "prefill")]
        for client in clients:
            client.fin()


async def test_instances_of_this_machine(start_gateway: Start) -> None:
    """That proxy takes localhost, 127.0.0.1 and 0.0.0.0 for one."""
    async with fleet(2) as (one, two):
        gateway = await start_gateway(config={"health": SLOW, "backends": [{"url": one.url, "role": "prefill"}]}, ready=False)
        assert place(one).startswith("127.0.0.1:")
        for host in ("localhost", "0.0.0.0", "127.0.0.1"):
            other = place(one).replace("127.0.0.1", host)
            answer = await gateway.admin(instances("add", type="prefill", instances=[other, place(two)]))
            assert answer.json()["current_prefill_instances"] == [place(one), place(two)]
        other = place(one).replace("127.0.0.1", "localhost")
        answer = await gateway.admin(instances("remove", type="prefill", instances=other))
        assert answer.json()["message"] == f"remove prefill instances: ['{place(one)}']."
        assert [b["name"] for b in await states(gateway)] == [place(two)]


async def test_a_role_that_is_listed_is_not_changed_in_passing(start_gateway: Start) -> None:
    """Who asks for it is told so, in force or taken out: an answer of 200 would mean that it decodes now."""
    async with fleet(1) as (one,):
        gateway = await start_gateway(config={"health": SLOW, "backends": [{"url": one.url, "role": "prefill"}]}, ready=False)
        for _ in range(2):
            answer = await gateway.admin(instances("add", type="decode", instances=place(one)))
            assert answer.status == 409
            assert f"{place(one)} is listed as a prefill backend" in answer.json()["error"]["message"]
            await gateway.admin(instances("remove", type="prefill", instances=place(one)))
        answer = await gateway.admin(instances("add", type="prefill", instances=place(one)))
        assert answer.json()["current_prefill_instances"] == [place(one)]
        assert answer.json()["current_decode_instances"] == []


async def test_a_role_that_was_added_is_not_changed_in_passing(start_gateway: Start) -> None:
    async with fleet(2) as (one, two):
        gateway = await start_gateway(config={"health": SLOW}, backends=[one.url])
        await gateway.admin(instances("add", type="prefill", instances=place(two)))
        answer = await gateway.admin(instances("add", type="decode", instances=place(two)))
        assert answer.status == 409
        assert f"{place(two)} is a prefill backend: remove it first" in answer.json()["error"]["message"]
        await gateway.admin(instances("remove", type="prefill", instances=place(two)))
        assert (await gateway.admin(instances("add", type="decode", instances=place(two)))).status == 200
        await gateway.admin(delete(place(two)))
        assert (await gateway.admin(add(url=two.url))).status == 201
        answer = await gateway.admin(instances("add", type="decode", instances=place(two)))  # it decodes, as it is
        assert place(two) in answer.json()["current_prefill_instances"]


async def test_a_token_is_asked(start_gateway: Start, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open sesame")
    async with fleet(1) as (one,):
        config = json.dumps({
            "backends": [{"url": one.url}], "admin": {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "token")},
            "listen": "127.0.0.1:0",
        })  # fmt: skip
        gateway = await start_gateway(config=config, ready=False)
        for request in (add(url="http://a"), delete(place(one)), drain(place(one)), instances("add"), instances("remove"),
                        s.get("/healthcheck")):  # fmt: skip
            assert (await gateway.admin(request)).status == 401
        request = s.post({"url": one.url}, "/-/backends", [("Authorization", "Bearer open sesame")])
        assert (await gateway.admin(request)).status == 200
