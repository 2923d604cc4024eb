"""Options that change traffic: each does exactly what it says, to what it is meant for, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.tls import Certificates
from tests.support.upstream import RawUpstream, running

Start = Callable[..., Awaitable[Gateway]]
A, B = s.delta("a"), s.delta("b", finish="stop")
USAGE = s.event({"id": "c", "object": "chat.completion.chunk", "choices": [],
                 "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})  # fmt: skip
inject = pytest.mark.config({"usage": "inject"})


def chat(_path: str = "/v1/chat/completions", **members: Any) -> bytes:
    return s.post({**s.CHAT, **members}, _path)


class TestUsageInject:
    @inject
    async def test_asks_and_strips(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The backend is asked for usage, the client gets its own stream less that event, the counters get both."""
        upstream.script = s.stream(A, B, USAGE, s.DONE)
        before = await gateway.metric("tokenpipe_output_tokens_total", source="usage")
        answer = await gateway.ask()
        assert answer.complete
        assert answer.body == A + B + s.DONE
        sent = upstream.requests[0].json()
        assert sent.pop("stream_options") == {"include_usage": True}
        assert sent == s.CHAT
        assert await gateway.metric("tokenpipe_output_tokens_total", source="usage") == before + 2
        entry = (await gateway.logged(outcome="complete"))[-1]
        assert (entry["prompt_tokens"], entry["output_tokens"]) == (3, 2)

    @inject
    @pytest.mark.parametrize("version", ["1.1", "1.0"])
    @pytest.mark.parametrize("framing", ["chunked", "length", "close"])
    async def test_every_framing(self, gateway: Gateway, upstream: RawUpstream, framing: str, version: str) -> None:
        """However the backend frames its stream, and for an HTTP/1.0 client too, what arrives is whole and right."""
        body = A + B + USAGE + s.DONE
        if framing == "chunked":
            upstream.script = s.stream(A, B, USAGE, s.DONE)
        elif framing == "length":
            upstream.script = s.reply(200, body, [s.SSE_TYPE])
        else:
            upstream.script = s.raw(s.head(200, [s.SSE_TYPE, ("connection", "close")]), body, then="fin")
        answer = await gateway.ask(s.post(version=version))
        assert answer.complete
        assert answer.body == A + B + s.DONE

    @inject
    async def test_split_anywhere(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Octet by octet, and several events in a chunk."""
        whole = s.SSE_HEAD + s.chunk(A + B) + s.chunk(USAGE[:30]) + s.chunk(USAGE[30:] + s.DONE) + s.LAST
        upstream.script = s.raw(*(whole[i : i + 1] for i in range(len(whole))))
        answer = await gateway.ask()
        assert answer.complete
        assert answer.body == A + B + s.DONE

    @inject
    async def test_events_are_not_late(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A whole event passes when it comes, not with the next one."""
        upstream.script = held = s.Held(s.SSE_HEAD, s.chunk(A))
        client = await gateway.connect()
        await client.send(s.post())
        await held.wire()
        await client.receive_until(A, 0.5)
        client.fin()

    @inject
    @pytest.mark.parametrize(
        "members",
        [
            {"stream_options": {"include_usage": True}},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ],
    )
    async def test_a_client_that_asked_itself(
        self, gateway: Gateway, upstream: RawUpstream, members: dict[str, Any]
    ) -> None:
        """It gets what it asked for, octet for octet, and so does the backend."""
        upstream.script = s.stream(A, B, USAGE, s.DONE)
        request = chat(**members)
        answer = await gateway.ask(request)
        assert answer.body == A + B + USAGE + s.DONE
        assert request.endswith(upstream.requests[0].body)

    @inject
    @pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None, "x": 1}])
    async def test_other_stream_options(self, gateway: Gateway, upstream: RawUpstream, options: Any) -> None:
        """Whatever else stands in stream_options stays there."""
        upstream.script = s.stream(A, B, USAGE, s.DONE)
        assert (await gateway.ask(chat(stream_options=options))).body == A + B + s.DONE
        assert upstream.requests[0].json()["stream_options"] == {**(options or {}), "include_usage": True}

    @inject
    @pytest.mark.parametrize("request_", [chat(stream=False), chat("/v1/embeddings"), chat("/v1/responses")])
    async def test_nothing_elsewhere(self, gateway: Gateway, upstream: RawUpstream, request_: bytes) -> None:
        """A whole answer and other routes are left alone."""
        upstream.script = s.reply(200, {"choices": [], "usage": {"total_tokens": 5}})
        answer = await gateway.ask(request_)
        assert answer.json() == {"choices": [], "usage": {"total_tokens": 5}}
        assert request_.endswith(upstream.requests[0].body)

    @inject
    async def test_an_error_instead_of_a_stream(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A refusal of the backend's passes as it is."""
        upstream.script = s.reply(429, b'{"error": {"message": "usage"}, "choices": [], "usage": {}}')
        answer = await gateway.ask()
        assert (answer.status, answer.body) == (429, b'{"error": {"message": "usage"}, "choices": [], "usage": {}}')

    @inject
    @pytest.mark.parametrize("then", ["fin", "reset"])
    async def test_a_stream_cut_short(self, gateway: Gateway, upstream: RawUpstream, then: str) -> None:
        """No proper end is invented, and no octet beyond the backend's."""
        upstream.script = s.raw(s.SSE_HEAD, s.chunk(A), s.chunk(B)[:40], then=then)
        answer = await gateway.ask()
        assert not answer.complete
        assert answer.body.startswith(A)
        assert (A + B).startswith(answer.body)


event = pytest.mark.config({"on_truncation": "error_event", "timeouts": {"idle": 0.4}})


class TestErrorEvent:
    @event
    @pytest.mark.parametrize("how", ["reset", "fin", "silence", "malformed"])
    async def test_one_event_then_the_cut(self, gateway: Gateway, upstream: RawUpstream, how: str) -> None:
        """At an event boundary: one event that is an error, no [DONE], and no last chunk."""
        if how == "silence":
            upstream.script = s.Held(s.SSE_HEAD, s.chunk(A))
        elif how == "malformed":
            upstream.script = s.raw(s.SSE_HEAD, s.chunk(A), b"zz\r\n")
        else:
            upstream.script = s.raw(s.SSE_HEAD, s.chunk(A), then=how)
        answer = await gateway.ask()
        assert not answer.complete
        assert answer.body.startswith(A)
        if how == "malformed":
            return  # octets that are no chunk may leave the place between two events in doubt
        (_, told) = answer.events()
        assert json.loads(told)["error"]["message"]
        assert b"[DONE]" not in answer.body

    @event
    async def test_anthropic(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """In the stream's own dialect."""
        start = s.event({"type": "message_start", "message": {"usage": {"input_tokens": 1}}}, "message_start")
        upstream.script = s.raw(s.SSE_HEAD, s.chunk(start), then="reset")
        answer = await gateway.ask(chat("/v1/messages"))
        assert not answer.complete
        assert b"event: error\n" in answer.body
        assert json.loads(answer.events()[-1])["type"] == "error"

    @event
    @pytest.mark.parametrize("begun", [A[:30], A[:-1], b"data: x"])
    async def test_not_within_an_event(self, gateway: Gateway, upstream: RawUpstream, begun: bytes) -> None:
        """Half an event is out: nothing is put behind it."""
        upstream.script = s.raw(s.SSE_HEAD, s.chunk(A), s.chunk(begun), then="reset")
        answer = await gateway.ask()
        assert not answer.complete
        assert answer.body == A + begun

    @event
    async def test_not_within_a_chunk(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The backend's chunk is half out: the framing would break."""
        upstream.script = s.raw(s.SSE_HEAD, b"1000\r\n" + A, then="reset")
        answer = await gateway.ask()
        assert not answer.complete
        assert A.startswith(answer.body) or answer.body == A

    @event
    async def test_not_into_what_is_no_stream(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A JSON answer, a coded stream, and a Content-Length are simply cut."""
        coded = s.head(200, [s.SSE_TYPE, ("content-encoding", "gzip"), ("transfer-encoding", "chunked")])
        for begun in (
            s.head(200, [s.JSON_TYPE, ("transfer-encoding", "chunked")]) + s.chunk(b'{"a": 1}\n\n'),
            coded + s.chunk(b"\x1f\x8b\x08\n\n"),
            s.head(200, [s.SSE_TYPE, ("content-length", "1000")]) + A,
        ):
            upstream.script = s.raw(begun, then="reset")
            answer = await gateway.ask()
            assert not answer.complete
            assert b"error" not in answer.body

    @event
    async def test_not_where_all_is_well(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A complete stream, and one that ends in order without its terminal event, get no octet more."""
        for events in ((A, B, s.DONE), (A,)):
            upstream.script = s.stream(*events)
            answer = await gateway.ask()
            assert answer.complete
            assert answer.body == b"".join(events)


comment = pytest.mark.config({"keepalive_comment": {"interval": 0.2}})


class TestKeepaliveComment:
    @comment
    async def test_in_silence(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Comments while the stream is silent, at event boundaries only; the events are the backend's."""
        upstream.script = s.stream(A, A, B, s.DONE, gap=0.5)
        answer = await gateway.ask()
        assert answer.complete
        assert answer.body.count(b": keep-alive\n\n") >= 3
        assert answer.body.replace(b": keep-alive\n\n", b"") == A + A + B + s.DONE

    @comment
    @pytest.mark.parametrize(
        ("first", "rest"),
        [
            (s.SSE_HEAD, s.chunk(A) + s.LAST),  # nothing before the backend's first octet: a BOM comes first
            (s.SSE_HEAD + s.chunk(A[:30]), s.chunk(A[30:]) + s.LAST),
            (s.SSE_HEAD + s.chunk(A)[:40], s.chunk(A)[40:] + s.LAST),
            (s.head(200, [s.SSE_TYPE, ("content-length", str(2 * len(A)))]) + A, A),
            (s.head(200, [s.JSON_TYPE, ("transfer-encoding", "chunked")]) + s.chunk(b'{"a":\n\n'),
             s.chunk(b"1}") + s.LAST),
            (s.head(200, [s.JSON_TYPE, ("transfer-encoding", "chunked")]) + s.chunk(b'{"a":'), s.chunk(b"1}") + s.LAST),
            (s.head(200, [s.SSE_TYPE, ("content-encoding", "gzip"), ("transfer-encoding", "chunked")])
             + s.chunk(b"\x1f\x8b\n\n"), s.chunk(b"x") + s.LAST),
            (s.head(200, [("content-type", "text/plain"), ("transfer-encoding", "chunked")]) + s.chunk(b"x\n\n"),
             s.chunk(b"y") + s.LAST),
            (s.head(500, [s.SSE_TYPE, ("transfer-encoding", "chunked")]) + s.chunk(A), s.LAST),
        ],
        ids=["first", "mid event", "mid chunk", "length", "json", "json split", "coded", "text", "error"],
    )  # fmt: skip
    async def test_nowhere_else(self, gateway: Gateway, upstream: RawUpstream, first: bytes, rest: bytes) -> None:
        """Not before the first octet, not within an event or a chunk, not in anything but a plain stream."""
        upstream.script = s.raw(first, rest, gap=0.7)
        streaming = b"json" not in first
        answer = await gateway.ask(chat(stream=streaming))
        assert answer.complete
        assert b"keep-alive" not in answer.body

    @comment
    async def test_not_while_events_come(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """A lively stream is left alone."""
        upstream.script = s.stream(*[A] * 12, B, s.DONE, gap=0.05)
        assert b"keep-alive" not in (await gateway.ask()).body


def limits(**of: Any) -> pytest.MarkDecorator:
    return pytest.mark.config({"limits": {"max_tokens": of}})


class TestMaxTokens:
    @limits(default=100, cap=1000)
    @pytest.mark.parametrize(
        ("path", "members", "expected"),
        [
            ("/v1/chat/completions", {"max_tokens": None}, {"max_tokens": 100}),
            ("/v1/chat/completions", {"max_tokens": 50}, {"max_tokens": 50}),
            ("/v1/chat/completions", {"max_tokens": 5000}, {"max_tokens": 1000}),
            ("/v1/chat/completions", {"max_completion_tokens": 5000}, {"max_completion_tokens": 1000}),
            ("/v1/completions", {"max_tokens": 1001}, {"max_tokens": 1000}),
            ("/v1/responses", {"max_output_tokens": 5000}, {"max_output_tokens": 1000}),
            ("/v1/responses", {}, {"max_output_tokens": 100}),
            ("/v1/messages", {"max_tokens": 5000}, {"max_tokens": 1000}),
            ("/v1/embeddings", {"max_tokens": 5000}, {"max_tokens": 5000}),
        ],
    )
    async def test_clamp(
        self, gateway: Gateway, upstream: RawUpstream, path: str, members: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        """The default where none is given, the cap where more is asked, every other octet as it came."""
        await gateway.ask(s.post({"model": "m", "temperature": 1e-7, **members}, path))
        assert upstream.requests[0].json() == {"model": "m", "temperature": 1e-7, **expected}
        assert b'"temperature": 1e-07' in upstream.requests[0].body

    @limits(cap=1000, over="reject")
    async def test_reject(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """400 that names the member, and nothing reaches the backend; what is within the cap passes."""
        for members in ({"max_tokens": 1001}, {"max_completion_tokens": 10**30}, {"max_tokens": "2000"}):
            answer = await gateway.ask(chat(**members))
            assert (answer.status, answer.get("x-gateway-error")) == (400, "bad_request")
            assert answer.json()["error"]["param"] == next(iter(members))
        assert not upstream.requests
        assert (await gateway.ask(chat(max_tokens=1000))).status == 200

    @limits(cap=1000)
    async def test_a_repeated_member(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Parsers take the last one of two, or the first: both are within the cap."""
        await gateway.ask(s.post(b'{"max_tokens": 5, "model": "m", "max_tokens": 5000}'))
        assert upstream.requests[0].body == b'{"max_tokens": 5, "model": "m", "max_tokens": 1000}'


KV = {"do_remote_prefill": True, "remote_engine_id": "x"}
MEGABYTES = {"model": "m", "messages": [{"role": "user", "content": "p" * 6_000_000}]}


class TestFields:
    @pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "bootstrap_room"])
    @pytest.mark.parametrize("spelling", ['"%s"', '"\\u%04x%s"'])
    async def test_reject(self, gateway: Gateway, upstream: RawUpstream, name: str, spelling: str) -> None:
        """400 that names it, however it is spelt; null, and the same words in the prompt, pass."""
        key = spelling % (name if spelling == '"%s"' else (ord(name[0]), name[1:]))
        answer = await gateway.ask(s.post(b'{"model": "m", %b : {"a": 1}}' % key.encode()))
        assert (answer.status, answer.get("x-gateway-error")) == (400, "bad_request")
        assert answer.json()["error"]["param"] == name
        assert not upstream.requests
        for body in (b'{"model": "m", "%b": null}' % name.encode(), b'{"x": {"%b": 1}}' % name.encode()):
            assert (await gateway.ask(s.post(body))).status == 200
            assert upstream.requests[-1].body == body

    @pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
    async def test_at_the_end_of_several_megabytes(
        self, gateway: Gateway, upstream: RawUpstream, length: bool
    ) -> None:
        """The body is passed on as it comes, yet its backend never gets the whole: no engine can begin with it."""
        body = json.dumps({**MEGABYTES, "kv_transfer_params": KV}).encode()
        fields = [] if length else [("Transfer-Encoding", "chunked")]
        head = s.post(body, fields=fields, length=length)[: -len(body)]
        pieces = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
        client = await gateway.connect()
        with contextlib.suppress(ConnectionError):
            await client.send(head)
            for piece in pieces:
                await client.send(piece if length else s.chunk(piece))
            await client.send(b"" if length else s.LAST)
        answer = await client.read_response()
        client.fin()
        assert (answer.status, answer.get("x-gateway-error")) == (400, "bad_request")
        for wire in upstream.connections:
            if b"POST" in wire.received[:10]:
                await wire.wait_closed(2)
                assert b"kv_transfer_params" not in wire.received or wire.received_bytes < len(body)
        assert not [r for r in upstream.requests if r.complete]

    async def test_several_megabytes_that_are_well(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The same without the member passes, octet for octet."""
        body = json.dumps(MEGABYTES).encode()
        assert (await gateway.ask(s.post(body))).status == 200
        assert upstream.requests[0].body == body

    @pytest.mark.config({"fields": {"kv_transfer_params": "strip"}})
    @pytest.mark.parametrize("at", ["first", "middle", "last", "only"])
    async def test_strip(self, gateway: Gateway, upstream: RawUpstream, at: str) -> None:
        """It goes, wherever it stands, and the rest stays as it came; the others are still refused."""
        one, two = b'"model":  "m"', b'"x": 1.0'
        kv = b'"kv_transfer_params": {"a": [1, "}"]}'
        parts = {"first": [kv, one, two], "middle": [one, kv, two], "last": [one, two, kv], "only": [kv]}[at]
        assert (await gateway.ask(s.post(b"{" + b", ".join(parts) + b"}"))).status == 200
        kept = [part for part in parts if part != kv]
        assert upstream.requests[0].body == b"{" + b", ".join(kept) + b"}"
        assert (await gateway.ask(s.post({"bootstrap_room": 1}))).status == 400

    @pytest.mark.config({"fields": {"kv_transfer_params": "strip"}})
    async def test_strip_in_several_megabytes(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Also at the very end of a large body."""
        body = json.dumps({**MEGABYTES, "kv_transfer_params": KV}).encode()
        assert (await gateway.ask(s.post(body))).status == 200
        assert upstream.requests[0].json() == MEGABYTES

    @pytest.mark.config(
        {"fields": {"kv_transfer_params": "pass", "ec_transfer_params": "pass", "bootstrap_room": "pass"}}
    )
    async def test_pass(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Nothing is looked into: what is no JSON passes too."""
        for body in (json.dumps({"kv_transfer_params": KV}).encode(), b"no json"):
            assert (await gateway.ask(s.post(body))).status == 200
            assert upstream.requests[-1].body == body


class TestSockets:
    async def test_unix_listener_and_backend(self, start_gateway: Start, tmp_path: Path) -> None:
        """A Unix socket on both sides: the same traffic, abort included, and the file is gone behind it."""
        front = tmp_path / "front.sock"
        async with running(unix=tmp_path / "back.sock") as upstream:
            config = {"listen": ["127.0.0.1:0", f"unix:{front}"]}
            gateway = await start_gateway(config=config, backends=[upstream.url])
            upstream.script = s.stream(A, B, s.DONE)
            client = await RawClient.connect(unix=front)
            for _ in range(3):
                answer = await client.ask()
                assert (answer.complete, answer.body) == (True, A + B + s.DONE)
            assert len([w for w in upstream.connections if b"POST" in w.received]) == 1
            upstream.script = held = s.Held(s.SSE_HEAD)
            await client.send(s.post())
            wire = await held.wire()
            began = time.monotonic()
            client.fin()
            assert await wire.wait_closed() - began < 0.25
        gateway.signal(15)
        await gateway.stopped()
        assert not front.exists()

    async def test_https_backend(self, start_gateway: Start, certificates: Certificates) -> None:
        """TLS to the backend, verified: one whose certificate is not vouched for is 502 and sees no request."""
        async with running(tls=certificates.server_context()) as upstream:
            upstream.script = s.stream(A, B, s.DONE)
            trusted = {"url": upstream.url, "tls": {"ca": str(certificates.ca)}}
            gateway = await start_gateway(config={"backends": [trusted]})
            for _ in range(3):
                assert (await gateway.ask()).body == A + B + s.DONE
            count = len(upstream.requests)
            other = await start_gateway(config={"backends": [{"url": upstream.url}], "health": {"interval": 60}})
            answer = await other.ask()
            assert (answer.status, answer.get("x-gateway-error")) == (502, "upstream_connect")
            blind = {"url": upstream.url, "tls": {"verify": False}}
            third = await start_gateway(config={"backends": [blind]})
            assert (await third.ask()).status == 200
            assert len(upstream.requests) == count + 1

    async def test_client_certificates(self, start_gateway: Start, certificates: Certificates) -> None:
        """To a backend that insists on one, and from clients where `tls.client_ca` does."""
        async with running(tls=certificates.server_context(client_ca=True)) as upstream:
            own = {"certificate": str(certificates.client_certificate), "key": str(certificates.client_key)}
            backend = {"url": upstream.url, "tls": {"ca": str(certificates.ca), **own}}
            front = {"certificate": str(certificates.certificate), "key": str(certificates.key)}
            config = {"backends": [backend], "tls": {**front, "client_ca": str(certificates.ca)}}
            gateway = await start_gateway(config=config)
            client = await gateway.connect(tls=certificates.client_context(certificate=True))
            assert (await client.ask()).status == 200
            client.fin()
            nobody = await gateway.connect(tls=certificates.client_context())
            await nobody.send(s.post())
            await nobody.wait_closed()
            assert b"HTTP/" not in nobody.received
            nobody.reset()
            assert len(upstream.requests) == 1


class TestLoadtest:
    @pytest.mark.config({"loadtest": {"enabled": True}, "mock": {"ttft": 0.01, "itl": 0.001, "tokens": 5}})
    async def test_enabled(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """The embedded synthetic upstream answers below /loadtest, and the backends see nothing of it."""
        answer = await gateway.ask(chat("/loadtest/v1/chat/completions", model="synthetic"))
        assert answer.status == 200
        assert answer.complete
        assert answer.events()[-1] == "[DONE]"
        assert not upstream.requests
        assert (await gateway.ask()).status == 200
        assert len(upstream.requests) == 1
        assert (await gateway.ask(s.get("/loadtest/metrics"))).status == 404
        assert (await gateway.ask(s.get("/loadtest/v1/../metrics"))).status == 400

    async def test_disabled(self, gateway: Gateway, upstream: RawUpstream) -> None:
        """Without it, the path is unknown like any other."""
        answer = await gateway.ask(s.post(path="/loadtest/v1/chat/completions"))
        assert (answer.status, answer.get("x-gateway-error")) == (404, "unknown_path")


async def test_options_are_off_by_default(gateway: Gateway, upstream: RawUpstream) -> None:
    """Not one octet of a stream is changed, in either direction, and nothing is said in silence."""

    async def script(wire: HttpWire, request: Message) -> None:
        await s.stream(A, b": ping\n\n", B, USAGE, s.DONE, gap=0.1)(wire, request)

    upstream.script = script
    request = s.post(b'{"stream":true,"a":1,"a":2,"max_tokens":100000000, "x":1e400}')
    answer = await gateway.ask(request)
    assert answer.body == A + b": ping\n\n" + B + USAGE + s.DONE
    assert request.endswith(upstream.requests[0].body)
    await asyncio.sleep(0)
