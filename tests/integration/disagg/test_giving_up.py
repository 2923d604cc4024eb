"""The gateway gives up in the midst of a pair of legs: by a deadline of its own, an operator's word, a hold that has passed."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support import script as s
from tests.support.disagg import Start
from tests.support.gateway import until
from tests.support.messages import HttpWire, Message
from tests.support.pairs import OUTPUT, Ledger, at_rest, config, decode, engines
from tests.support.shy import Shy
from tests.support.tls import Certificates


@pytest.mark.parametrize("how", ["timeouts.total", "operator"])
@pytest.mark.parametrize("stream", [True, False])
async def test_before_decodes_first_octet(start_gateway: Start, how: str, stream: bool) -> None:
    """Decode may not have fetched yet: its leg goes on, as where the client leaves, and nothing is stranded."""
    async with engines() as ((p,), (d,), ledger):
        d.script = held = s.Held(*[s.SSE_HEAD] * stream)
        timeouts = {"total": 1} if how == "timeouts.total" else {}
        gateway = await start_gateway(
            config=config([p], [d], timeouts=timeouts, disaggregation={"abort_unsafe": not stream, "release_timeout": 9})
        )
        client = await gateway.connect()
        await client.send(s.post({**s.CHAT, "stream": stream}, fields=[("X-Request-Id", "one")]))
        wire = await held.wire()
        if how == "operator":
            assert (await gateway.admin(s.get("/-/streams/one", method="DELETE"))).status < 300
        answer = await client.read_response()
        client.reset()
        assert (answer.status, b"timeouts.total" in answer.body) == ((504, True) if how == "timeouts.total" else (503, False))
        await asyncio.sleep(0.1)
        assert not wire.ended and await gateway.metric("tokenpipe_pd_release_inflight") == 1
        ledger.fetch(d.requests[0])
        await wire.send(s.chunk(OUTPUT[0]) if stream else s.head(200, [("content-length", "9")]) + b"{")
        await wire.wait_closed(timeout=2)
        await at_rest(gateway, ledger, p, d)
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 0
        assert len(d.requests) == 1


async def test_the_hold_passes_while_decode_is_connected_to(start_gateway: Start, certificates: Certificates) -> None:
    """The prompt is prefilled anew, and the connection that came too late is not left behind."""
    async with engines() as ((p,), (d,), ledger):
        shy = Shy(d.port, certificates)
        async with shy.listening() as url:
            gateway = await start_gateway(
                config=config(
                    [p], [url, d],
                    disaggregation={"hold": 1, "release": "never"}, timeouts={"connect": 0.9}, retry={"attempts": 4},
                    breaker={"failures": 50},
                )
            )  # fmt: skip
            for _ in range(2):  # one of them goes to the other one first
                assert (await gateway.ask()).body == b"".join(OUTPUT)
            assert len(p.requests) == 3
            await until(lambda: ledger.ever == 3, "prefills")
            await at_rest(gateway, ledger, p, d)
            assert await gateway.metric("tokenpipe_upstream_connections", backend=f"127.0.0.1:{d.port}") == 1


@pytest.mark.parametrize("how", ["answers", "fails", "dies"])
async def test_moriio_write_whose_decode_begins_first(start_gateway: Start, how: str) -> None:
    """Its output is kept back until prefill's outcome is known, as much as there is room for; where prefill fails, that is the
    client's answer."""
    large = s.delta("x" * (4 << 20))
    async with engines() as ((p,), (d,), ledger):
        d.script, go_on = (begun := s.Held(s.SSE_HEAD, s.chunk(OUTPUT[0]), s.chunk(large))), asyncio.Event()
        end = {"answers": s.reply(200, {"choices": []}), "fails": s.reply(400, b"no"), "dies": s.vanish}[how]

        async def late(wire: HttpWire, request: Message) -> None:
            await go_on.wait()
            await end(wire, request)

        p.script = late
        text = json.loads(config([p], [d], disaggregation={"connector": "moriio_write"}, retry={"attempts": 1}))
        for backend in text["backends"]:
            backend["connector"] = {"handshake_port": 1, "notify_port": 2}
        # a deadline of decode's that passes meanwhile: it has answered
        text |= {"timeouts": {"first_byte": 0.6}}
        text["disaggregation"]["prefill_timeout"] = 9
        gateway = await start_gateway(config=json.dumps(text))
        client = await gateway.connect()
        await client.send(s.post())
        await d.wait_requests()
        await asyncio.sleep(1)
        assert not client.received
        assert not begun.wires, "all of decode's output was taken in, with nobody to take it"
        go_on.set()
        if how == "answers":
            await client.receive_until(OUTPUT[0])
            client.reset()
        else:
            answer = await client.read_response()
            assert (answer.status, answer.body == b"no") == ((400, True) if how == "fails" else (502, False))
            client.reset()
        await at_rest(gateway, ledger, p, d)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", [400, 404, 429, 500, "reset", "failed load"])
async def test_decode_refuses_what_its_client_has_left(start_gateway: Start, stream: bool, how: int | str) -> None:
    """Whoever has not fetched what prefill holds is asked for it once more, unless prefill has been told: with 400."""
    error = {"error": {"message": "no", "type": "InternalServerError", "code": 500}}
    end = s.vanish if how == "reset" else s.reply(500 if how == "failed load" else int(how), error)
    if how == "failed load" and stream:
        end = s.stream(s.event(error))
    async with engines() as ((p,), (d,), ledger):
        gone = asyncio.Event()

        async def late(wire: HttpWire, request: Message) -> None:
            await gone.wait()
            if how == 400:
                ledger.fetch(request)
            await end(wire, request)

        d.script = s.in_turn(late, decode(ledger))
        gateway = await start_gateway(config=config([p], [d]))
        client = await gateway.connect()
        await client.send(s.post({**s.CHAT, "stream": stream}))
        await d.wait_requests()
        client.reset()
        await gateway.logged(outcome="client_gone")
        gone.set()
        await d.wait_requests(1 if how == 400 else 2)
        await until(lambda: not ledger.held, "KV that is fetched")
        await at_rest(gateway, ledger, p, d)
        assert len(d.requests) == (1 if how == 400 else 2)
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 0
        assert await gateway.metric("tokenpipe_pd_release_total", result="done") == (how != 400)


async def test_a_pair_between_which_kv_does_not_get_across(start_gateway: Start) -> None:
    """It counts against the pair, and not against either of them: other decode engines are asked, while there are any."""
    error = s.stream(s.event({"error": {"message": "no", "type": "InternalServerError", "code": 500}}))
    async with engines(1, 2) as ((p,), (far, near), ledger):
        far.script = error
        breaker = {"failures": 2, "open": 60}
        gateway = await start_gateway(
            config=config([p], [far, near], breaker=breaker, disaggregation={"release": "never"}, health={"interval": 0.1})
        )
        for _ in range(10):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
        assert len(far.requests) == 2
        listed = (await gateway.admin(s.get("/-/backends"))).json()
        assert [backend["breaker"] for backend in listed] == ["closed"] * 3
        far.script = decode(ledger)
        await near.stop()
        for _ in range(4):
            assert (await gateway.ask()).body == b"".join(OUTPUT)
        assert len(far.requests) == 6


@pytest.mark.parametrize("grace", [0, 0.3])
@pytest.mark.parametrize("how", ["reset", "fin", "malformed", "hangs", "client leaves"])
async def test_prefills_answer_is_cut_off(start_gateway: Start, how: str, grace: float) -> None:
    """It has finished, and nobody knows where its KV is: that is counted, once."""
    async with engines() as ((p,), (d,), _):
        head = s.head(200, [s.JSON_TYPE, ("transfer-encoding", "chunked")])
        cut = head + s.chunk(b'{"kv_transfer_params": {') + (b"oops\r\n" if how == "malformed" else b"")
        held = s.Held(cut)
        p.script = s.raw(cut, then="fin" if how == "fin" else "reset") if how in ("fin", "reset") else held
        more = {"disaggregation": {"prefill_timeout": 0.3, "prefill_grace": grace, "hold": 2}, "retry": {"attempts": 1}}
        gateway = await start_gateway(config=config([p], [d], **more))
        client = await gateway.connect()
        await client.send(s.post())
        if how == "client leaves":
            await held.wire()
        else:
            assert (await client.read_response()).status == {"hangs": 504}.get(how, 502)
        client.reset()
        await at_rest(gateway, Ledger(), p, d)
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 1
        assert not d.requests
