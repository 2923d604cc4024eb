"""Acceptance cases of disaggregation, by their numbers, that are about neither shaping (test_shaping.py), nor errors
(test_disagg_serial.py, test_disagg_concurrent.py), nor leaving (test_disagg_aborts.py, test_phases.py)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import resource
import socket
import time
from typing import Any

import pytest

from tests.integration.test_fleet import states
from tests.support import script as s
from tests.support.client import RawClient
from tests.support.disagg import Start
from tests.support.gateway import until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, at_rest, config, decode, engines, prefill

WHOLE = {**s.CHAT, "stream": False}
SHOWN = ("tokenpipe_requests_total", "tokenpipe_requests_in_flight", "tokenpipe_queue_depth", "tokenpipe_backend_in_flight")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("how", ["bypass", "auto", "pass"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_8_a_tool_that_must_be_called(start_gateway: Start, choice: Any, how: str) -> None:
    """Decode alone; or a prefill that need not call it; or one that answers as it does. Decode is told what the client said."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d], disaggregation={"tool_choice": how}))
        asked = {**s.CHAT, "tools": [TOOL], "tool_choice": choice}
        assert (await gateway.ask(s.post(asked))).status == 200
        assert d.requests[0].json()["tool_choice"] == choice
        if how == "bypass":
            assert not p.requests and await gateway.metric("tokenpipe_pd_bypass_total", reason="tool_choice") == 1
        else:
            assert p.requests[0].json()["tool_choice"] == ("auto" if how == "auto" else choice)
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "path, more",
    [("/v1/chat/completions", {"prompt_logprobs": 1}), ("/v1/completions", {"prompt_logprobs": 1}),
     ("/v1/completions", {"echo": True, "logprobs": 1})],
)  # fmt: skip
async def test_9_log_probabilities_of_the_prompt(start_gateway: Start, path: str, more: dict[str, Any], stream: bool) -> None:
    """400 that says why: no engine is asked, as some die of it."""
    said: dict[str, Any] = {"messages": s.CHAT["messages"]} if path.endswith("chat/completions") else {"prompt": "x" * 200}
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        answer = await gateway.ask(s.post({"model": "m", "stream": stream, "max_tokens": 9, **said, **more}, path))
        assert answer.status == 400 and answer.json()["error"]["param"] in more
        assert "disaggregation.prompt_logprobs" in answer.json()["error"]["message"]
        assert not p.requests and not d.requests
        await at_rest(gateway, ledger, p, d)


async def test_30_pauses_within_a_stream(start_gateway: Start) -> None:
    """Longer than the limit of every phase before it: only timeouts.idle counts, and that from one octet to the next."""
    async with engines() as ((p,), (d,), ledger):
        d.script = decode(ledger, s.stream(*OUTPUT, gap=0.9))
        timeouts = {"first_byte": 0.6, "connect": 0.5, "idle": 20}
        extra = {"prefill_timeout": 0.6, "release_timeout": 0.5, "admission_grace": 0.1, "hold": 1}
        gateway = await start_gateway(config=config([p], [d], timeouts=timeouts, disaggregation=extra))
        answer = await gateway.ask(timeout=20)
        assert answer.complete and answer.body == b"".join(OUTPUT)
        await at_rest(gateway, ledger, p, d)


@pytest.mark.seconds(60)
@pytest.mark.parametrize("size, most", [(4000, 260), (60000, 340)], ids=["events", "large ones"])
async def test_37_a_client_that_does_not_read(start_gateway: Start, size: int, most: int) -> None:
    """Of 50 MB hardly any is held, for none of forty: limits.write_buffer, a read or two on top of it, and as much as there is
    of an event that a read has cut. When timeouts.client_write is over decode is told."""
    async with engines() as ((p,), (d,), ledger):
        piece = s.chunk(s.delta("x" * size))

        async def flood(wire: HttpWire, request: Message) -> None:
            wire.keep_log = False
            await wire.send(s.SSE_HEAD)
            with contextlib.suppress(ConnectionError):
                for _ in range(50_000_000 // size):
                    await wire.send(piece)

        d.script = decode(ledger, flood)
        gateway = await start_gateway(config=config([p], [d], timeouts={"client_write": 3}))
        before = gateway.rss()
        clients = [await gateway.connect() for _ in range(40)]
        for client in clients:
            await client.send(s.post())
        await d.wait_requests(len(clients))
        peak = 0
        async with asyncio.timeout(30):
            while await gateway.metric("tokenpipe_requests_in_flight"):
                peak = max(peak, gateway.rss() - before)
                await asyncio.sleep(0.2)
        print(f"{peak / len(clients) / 1024:.0f} KiB each")
        assert peak / len(clients) < most << 10
        assert len(await gateway.logged(len(clients), outcome="client_stalled")) == len(clients)
        await until(lambda: all(wire.ended for wire in d.wires), "decode is told")
        assert all(wire.sent_bytes < 10_000_000 for wire in d.wires)
        for client in clients:
            client.reset()
        await at_rest(gateway, ledger, p, d)


FRAMES = (
    b": a comment\r\n\r\n"
    + s.delta("日本語 é 🎉")
    + s.delta("a").replace(b"\n\n", b"\r\n\r\n")
    + s.delta("b") + s.delta("c")
    + b"event: odd\ndata: one\ndata: two\n\n"
    + s.delta("", finish="stop") + s.DONE
)  # fmt: skip


@pytest.mark.seconds(60)
async def test_38_cut_at_every_offset(start_gateway: Start) -> None:
    """I5 by SHA-256: what decode sent is what came, wherever its writes and its chunks are cut."""
    wanted = hashlib.sha256(FRAMES).hexdigest()
    async with engines() as ((p,), (d,), ledger):
        offset = 0

        async def cut(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD)
            for part in (FRAMES[:offset], FRAMES[offset:]):
                if part:
                    await wire.send(s.chunk(part))
                    await asyncio.sleep(0)
            await wire.send(s.LAST)

        d.script = decode(ledger, cut)
        gateway = await start_gateway(config=config([p], [d]))
        client = await gateway.connect()
        for offset in range(len(FRAMES)):  # which the script reads
            answer = await client.ask()
            assert answer.complete and hashlib.sha256(answer.body).hexdigest() == wanted, offset
        client.fin()
        # and whoever counts beside it counts the same
        lines = await gateway.logged(len(FRAMES))
        assert {(line["outcome"], line["output_tokens"]) for line in lines} == {("complete", 5)}  # the one that ends it, too
        assert await gateway.metric("tokenpipe_time_to_first_token_seconds_count") == len(FRAMES)
        await at_rest(gateway, ledger, p, d)


@pytest.mark.seconds(60)
async def test_43_an_answer_of_20_megabytes(start_gateway: Start) -> None:
    """Its length as decode said, passed on as it comes, never held."""
    body = b'{"choices": [{"index": 0, "message": {"content": "' + b"x" * (20 << 20) + b'"}, "finish_reason": "stop"}]}'
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def slow(wire: HttpWire, request: Message) -> None:
            ledger.fetch(request)
            await wire.send(s.head(200, [s.JSON_TYPE, ("content-length", str(len(body)))]) + body[: 1 << 20])
            await go_on.wait()
            await wire.send(body[1 << 20 :])

        d.script = slow
        gateway = await start_gateway(config=config([p], [d]))
        before = gateway.rss()
        client = await gateway.connect()
        await client.send(s.post(WHOLE))
        head = await client.read_response_head()
        assert head.status == 200 and head.get("content-length") == str(len(body))
        go_on.set()
        await asyncio.sleep(0.5)
        assert gateway.rss() - before < 8 << 20
        client.reset()
        answer = await gateway.ask(s.post(WHOLE), timeout=30)
        assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()
        await at_rest(gateway, ledger, p, d)


async def test_49_a_prefill_leaves_while_others_are_busy(start_gateway: Start) -> None:
    """It gets nothing new, and is gone when its own legs have ended, whatever goes on elsewhere."""
    async with engines(2) as ((one, other), (d,), ledger):
        one.script = other.script = s.Held()
        gateway = await start_gateway(config=config([one, other], [d]))
        clients = [await gateway.connect() for _ in range(2)]
        await clients[0].send(s.post())
        await until(lambda: bool(one.requests or other.requests), "the first prefill leg")
        one, other = (one, other) if one.requests else (other, one)
        await clients[1].send(s.post())
        await other.wait_requests(1)
        name = f"127.0.0.1:{one.port}"
        await gateway.admin(s.post({"type": "prefill", "instances": name}, "/instances/remove"))
        other.script = prefill(ledger)
        for _ in range(3):
            assert (await gateway.ask()).status == 200
        assert len(one.requests) == 1
        assert {b["name"]: b["state"] for b in await states(gateway)}[name] == "draining"
        clients[0].reset()
        async with asyncio.timeout(5):
            while name in [b["name"] for b in await states(gateway)]:
                await asyncio.sleep(0.02)
        assert await gateway.metric("tokenpipe_requests_in_flight") == 1
        clients[1].reset()
        await at_rest(gateway, ledger, one, other, d)


async def test_50_what_is_added(start_gateway: Start) -> None:
    """Of a wrong type: 4xx. Not up: no request fails by it. IPv6: as any other. (Without the token: test_fleet_api.)"""
    async with engines(2) as ((p, six), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d]))
        wrong = await gateway.admin(s.post({"type": "neither", "instances": "127.0.0.1:1"}, "/instances/add"))
        assert 400 <= wrong.status < 500
        await gateway.admin(s.post({"type": "prefill", "instances": ["127.0.0.1:1", "[::1]:9"]}, "/instances/add"))
        for _ in range(6):
            assert (await gateway.ask()).status == 200
        assert len(p.requests) == 6
        await six.stop()
        await six.start(listener := socket.create_server(("::1", 0), family=socket.AF_INET6))
        place = f"[::1]:{listener.getsockname()[1]}"
        await gateway.admin(s.post({"type": "prefill", "instances": place}, "/instances/add"))
        async with asyncio.timeout(5):
            while {b["name"]: b["state"] for b in await states(gateway)}[place] == "unknown":
                await asyncio.sleep(0.02)
        for _ in range(20):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
        assert six.requests and len(p.requests) + len(six.requests) == 26
        await at_rest(gateway, ledger, p, six, d)


async def test_51_all_are_removed(start_gateway: Start) -> None:
    async with engines(2, 2) as (ps, ds, ledger):
        gateway = await start_gateway(config=config(ps, ds))
        for kind, all_ in (("prefill", ps), ("decode", ds)):
            names = [f"127.0.0.1:{one.port}" for one in all_]
            await gateway.admin(s.post({"type": kind, "instances": names}, "/instances/remove"))
        answer = await gateway.ask()
        assert answer.status == 503 and answer.get("retry-after") is not None
        assert not any(one.requests for one in (*ps, *ds))
        await at_rest(gateway, ledger, *ps, *ds)


@pytest.mark.seconds(120)
async def test_61_many_at_once(start_gateway: Start, request: pytest.FixtureRequest) -> None:
    """More than any pool of connections has, and prefill holds for all of them before decode lets one through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    count = min(4096, (hard - 1000) // 3)  # of each the client's, prefill's and decode's
    assert count >= 1000, f"needs 4000 descriptors and more, and may have {hard} (ulimit -Hn)"
    async with engines() as ((p,), (d,), ledger):
        go_on = asyncio.Event()

        async def waits(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            await decode(ledger)(wire, request)

        d.script = waits
        gateway = await start_gateway(config=config([p], [d]))
        clients = [await gateway.connect() for _ in range(count)]
        for client in clients:
            await client.send(s.post())
        with contextlib.suppress(TimeoutError):
            await d.wait_requests(count, timeout=30)
        assert len(d.requests) == count, [sample for sample in await gateway.metrics() if sample[2] and sample[0] in SHOWN]
        assert len(ledger.held) == count
        go_on.set()
        for client in clients:
            assert (await client.read_response(timeout=60)).body == b"".join(OUTPUT)
            client.fin()
        await at_rest(gateway, ledger, p, d)
        assert not ledger.held


async def test_62_engines_that_close_idle_connections(start_gateway: Start) -> None:
    """As they do after five seconds, and in the moment of reuse: no client sees it, and no attempt is spent."""
    async with engines() as ((p,), (d,), ledger):
        gateway = await start_gateway(config=config([p], [d], retry={"attempts": 1}))
        for _ in range(5):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
            for wire in (*p.open_connections, *d.open_connections):
                wire.fin()
        await at_rest(gateway, ledger, p, d)


async def test_64_a_stop_with_all_under_way(start_gateway: Start) -> None:
    """A request that comes now: 503; a connection: none. The stream ends as it would, and so does a release leg, which is
    waited for even when it is all that is left; one whose client leaves meanwhile follows it."""
    async with engines() as ((p,), (d,), ledger):
        go_on, let_go = asyncio.Event(), asyncio.Event()

        async def slowly(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD + s.chunk(OUTPUT[0]))
            await go_on.wait()
            await wire.send(b"".join(map(s.chunk, OUTPUT[1:])) + s.LAST)

        async def answers(wire: HttpWire, request: Message) -> None:
            if not request.json()["stream"]:
                await let_go.wait()
            await decode(ledger, slowly)(wire, request)

        d.script = answers
        gateway = await start_gateway(config=config([p], [d], disaggregation={"prefill_grace": 20}))
        kept, client = await gateway.connect(), await gateway.connect()
        await client.send(s.post())
        await kept.send(s.post()[:60])
        answer = await client.read_response_head()
        leaving = []
        for number in range(2):  # while prefill computes: what it holds then is released
            p.script = prefill(ledger, seconds=0.2 + 0.4 * number)
            leaving.append(await gateway.connect())
            await leaving[-1].send(s.post())
            await p.wait_requests(2 + number)
        leaving[0].reset()
        await d.wait_requests(2)
        assert await gateway.metric("tokenpipe_pd_release_inflight") == 1
        gateway.signal(15)
        await until(lambda: "stopping" in gateway.stderr(), "the beginning of the stop")
        leaving[1].reset()
        with pytest.raises(OSError):
            await gateway.connect()
        await kept.send(s.post()[60:])
        refused = await kept.read_response()
        assert (refused.status, refused.get("x-gateway-error")) == (503, "draining")
        await d.wait_requests(3)
        assert gateway.process.poll() is None
        go_on.set()
        assert (await client.read_response_body(answer)).complete
        await gateway.logged(outcome="complete")
        await asyncio.sleep(0.3)
        assert gateway.process.poll() is None and len(ledger.held) == 2
        let_go.set()
        await gateway.stopped()
        assert not ledger.held and ledger.ever == 3
        assert [request.json()["max_tokens"] for request in d.requests[1:]] == [1, 1]
        for one in (client, kept):
            one.fin()


async def test_65_a_role_is_no_token(start_gateway: Start) -> None:
    """The parts add up to the time to the first token; an event with a role alone is none."""
    async with engines() as ((p,), (d,), ledger):
        role = s.event({"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})

        async def script(wire: HttpWire, request: Message) -> None:
            await asyncio.sleep(0.1)
            await wire.send(s.SSE_HEAD + s.chunk(role))
            await asyncio.sleep(0.2)
            await wire.send(b"".join(map(s.chunk, OUTPUT)) + s.LAST)

        p.script, d.script = prefill(ledger, seconds=0.15), decode(ledger, script)
        gateway = await start_gateway(config=config([p], [d]))
        names = ("pd_prefill", "pd_decode_first_byte", "queue", "pd_handoff", "time_to_first_byte", "time_to_first_token")
        before, apart = dict.fromkeys(names, 0.0), []
        for _ in range(5):
            began = time.monotonic()
            assert (await gateway.ask()).status == 200
            took = time.monotonic() - began
            await gateway.idle()
            samples = await gateway.metrics()
            sums = {name: samples.value(f"tokenpipe_{name}_seconds_sum") for name in names}
            these = {name: sums[name] - before[name] for name in names}
            before = sums
            parts = sum(these[name] for name in names[:4])
            assert these["pd_prefill"] >= 0.15 and these["pd_decode_first_byte"] >= 0.1
            apart.append(abs(parts - these["time_to_first_byte"]))  # body, pick, our own steps
            assert parts + 0.2 <= these["time_to_first_token"] + 0.005
            assert these["time_to_first_token"] <= took + 0.05  # marked behind the write, which was read by then
        assert min(apart) < 0.005 and max(apart) < 0.1, apart  # of five the best, as the machine may have other things to do
        await at_rest(gateway, ledger, p, d)


async def test_47_in_equal_parts(start_gateway: Start) -> None:
    """400 one after the other, four of each: 25 % for each, within 5."""
    async with engines(4, 4) as (ps, ds, ledger):
        gateway = await start_gateway(config=config(ps, ds))
        client: RawClient = await gateway.connect()
        for _ in range(400):
            assert (await client.ask()).status == 200
        client.fin()
        for engine in (*ps, *ds):
            assert 80 <= len(engine.requests) <= 120
        await at_rest(gateway, ledger, *ps, *ds)


async def test_i5_by_checksum(start_gateway: Start) -> None:
    """What the client got, streamed and not, is what decode wrote."""
    async with engines() as ((p,), (d,), ledger):
        whole = json.dumps({"choices": [{"index": 0, "message": {"content": "日" * 999}}]}, ensure_ascii=False).encode()
        d.script = s.in_turn(decode(ledger, s.stream(FRAMES)), decode(ledger))
        gateway = await start_gateway(config=config([p], [d]))
        assert hashlib.sha256((await gateway.ask()).body).digest() == hashlib.sha256(FRAMES).digest()

        async def one_piece(wire: HttpWire, request: Message) -> None:
            ledger.fetch(request)
            await s.reply(200, whole)(wire, request)

        d.script = one_piece
        assert hashlib.sha256((await gateway.ask(s.post(WHOLE))).body).digest() == hashlib.sha256(whole).digest()
        await at_rest(gateway, ledger, p, d)
