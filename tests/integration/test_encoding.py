"""Bodies are octets: what is sent at one end is what arrives at the other one, coded, odd or broken."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import zlib

import pytest

from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.script import LAST, SSE_TYPE, chunk, head, post, raw
from tests.support.upstream import RawUpstream

QUIET = {"breaker": {"failures": 1_000_000}, "retry": {"attempts": 1}}
pytestmark = pytest.mark.config(QUIET)

NOISE = random.Random(1).randbytes(300_000)
EVENT = 'data: {"choices":[{"index":0,"delta":{"content":"你好🙂 é\u2028"}}]}\n\n'.encode()
EVENTS = EVENT * 3 + b"data: [DONE]\n\n"
CODED: dict[str, tuple[str, bytes]] = {
    "gzip": ("gzip", gzip.compress(EVENTS)),
    "gzip of several members": (
        "gzip",
        gzip.compress(EVENTS[:50]) + gzip.compress(EVENTS[50:]) + gzip.compress(b"") * 50,
    ),
    "gzip corrupt": ("gzip", gzip.compress(EVENTS)[:-9] + b"\x00" * 9),
    "gzip truncated": ("gzip", gzip.compress(EVENTS)[:-4]),
    "no gzip at all": ("gzip", EVENTS),
    "gzip with a tail": ("gzip", gzip.compress(EVENTS) + NOISE[:99]),
    "a bomb": ("gzip", gzip.compress(b"\x00" * 20_000_000, 9)),
    "deflate": ("deflate", zlib.compress(EVENTS)),
    "raw deflate": ("deflate", zlib.compress(EVENTS, wbits=-15)),
    "br": ("br", NOISE[:2000]),
    "zstd": ("zstd", b"\x28\xb5\x2f\xfd" + NOISE[:2000]),
    "unknown": ("x-own", NOISE[:2000]),
    "twice": ("gzip, gzip", gzip.compress(gzip.compress(EVENTS))),
    "identity": ("identity", EVENTS),
    "upper case": ("GZIP", gzip.compress(EVENTS)),
}
PLAIN = {
    "random": NOISE,
    "every value": bytes(range(256)) * 9,
    "NUL": b"\x00" * 5000,
    "BOM": b"\xef\xbb\xbf" + EVENTS,
    "no UTF-8": b"data: \xff\xfe\xf0\x9f \xed\xa0\x80\n\n" + EVENTS,
    "line ends": b"data: a\r\n\r\ndata: b\r\rdata: c\n\n\r\n\n\r: x\r\n",
    "chunk look-alike": b"5\r\nhello\r\n0\r\n\r\n" * 20,
    "head look-alike": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 20,
    "U+2028": "data: \u2028\u2029\x85\n\n".encode() * 9,
    "one octet": b"\n",
    "a line of 600 kB": b"data: " + b"x" * 600_000 + b"\n\n",
}
ACCEPTS = [None, "identity", "gzip, deflate, br, zstd", "zstd, br;q=0.5", ""]


def digest(octets: bytes) -> str:
    return hashlib.sha256(octets).hexdigest()


def framings(fields: list[tuple[str, str]], body: bytes) -> dict[str, tuple[list[bytes], str]]:
    rng = random.Random(len(body))
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(8))
    parts = [p for p in (body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)) if p]
    return {
        "length": ([head(200, [*fields, ("Content-Length", str(len(body)))]) + parts[0], *parts[1:]], "keep"),
        "chunked": ([head(200, [*fields, ("Transfer-Encoding", "chunked")]), *(chunk(p) for p in parts), LAST], "keep"),
        "close": ([head(200, fields), *parts], "fin"),
    }


def asked(accept: str | None) -> bytes:
    return post(fields=[("Accept-Encoding", accept)] if accept is not None else [])


async def relayed(gateway: Gateway, upstream: RawUpstream, fields: list[tuple[str, str]], body: bytes) -> None:
    for name, (pieces, then) in framings(fields, body).items():
        upstream.script = raw(*pieces, then=then)
        for accept in ACCEPTS if len(body) < 50_000 else ACCEPTS[1:3]:
            answer = await gateway.ask(asked(accept))
            assert digest(answer.body) == digest(body) and answer.complete, name
            assert answer.without("date", "x-request-id", "content-length", "transfer-encoding", "connection") == fields
            assert answer.get("content-length") == (str(len(body)) if name == "length" else None)
            assert upstream.requests[-1].all("accept-encoding") == ([accept] if accept is not None else [])


@pytest.mark.parametrize("name", CODED)
async def test_a_coded_response_passes_as_it_is(gateway: Gateway, upstream: RawUpstream, name: str) -> None:
    """Content-Encoding, Content-Length and ETag describe the very octets relayed; nobody unpacks them."""
    coding, body = CODED[name]
    before = gateway.rss()
    await relayed(gateway, upstream, [SSE_TYPE, ("Content-Encoding", coding), ("ETag", '"x"')], body)
    assert gateway.rss() - before < 12_000_000


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json", "audio/mpeg"])
@pytest.mark.parametrize("name", PLAIN)
async def test_any_response_body_passes_as_it_is(gateway: Gateway, upstream: RawUpstream, name: str, kind: str) -> None:
    """Whatever its type claims: no decoding, no line splitting, no JSON."""
    await relayed(gateway, upstream, [("Content-Type", kind)], PLAIN[name])


@pytest.mark.parametrize("kind", ["application/octet-stream", "multipart/form-data; boundary=x", "text/plain", ""])
async def test_any_upload_passes_as_it_is(gateway: Gateway, upstream: RawUpstream, kind: str) -> None:
    """Where no JSON is expected, a request's body is nobody's business: plain, coded, corrupt, fixed or in chunks."""
    bodies = [*PLAIN.values(), *(body for _, body in CODED.values())]
    for coding, body in [(None, b) for b in bodies] + [c for c in CODED.values() if len(c[1]) < 9000]:
        fields = [("content-type", kind), *([("Content-Encoding", coding)] if coding else [])]
        request = post(body, "/v1/audio/transcriptions", fields).replace(b"Content-Type: application/json\r\n", b"", 1)
        in_chunks = request.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")[: -len(body)]
        in_chunks += b"".join(chunk(body[i : i + 3333]) for i in range(0, len(body), 3333)) + LAST
        for octets in (request, in_chunks):
            assert (await gateway.ask(octets)).status == 200
            got = upstream.requests[-1]
            assert digest(got.body) == digest(body) and got.complete and got.all("content-type") == [kind]
            assert got.all("content-encoding") == ([coding] if coding else [])


JSON = [
    b'\xef\xbb\xbf {"seed":165598928036513123123 ,\t"t":1.0,"x":1e400,"a":1,"a":2,"s":"\\ud800",'
    b'"u":"\xe2\x80\xa8 \xc3\xa9",\r\n"stream":true, "model" : "m"}\n ',
    b'{"model":"m","n":-0.0,"f":0.1e+2,"big":' + b"9" * 400 + b',"nan":NaN,"inf":-Infinity}',
    b'{"model":"m","deep":' + b"[" * 3000 + b"]" * 3000 + b"}",
    b'{"model":"m","bad":"\xff\xfe\xc0\xaf"}',
    json.dumps({"model": "m", "messages": [{"content": "x" * 2_000_000}], "stream": True}, indent=3).encode(),
    b"{}",
    b'{"model":"m","s":"\\u0000\\/\\b"}',
]


@pytest.mark.parametrize("number", range(len(JSON)))
async def test_a_json_body_is_read_and_never_written_anew(gateway: Gateway, upstream: RawUpstream, number: int) -> None:
    """Big integers, 1.0, doubled keys, lone surrogates, blanks, a byte order mark: the same octets arrive."""
    body = JSON[number]
    in_chunks = post(b"", fields=[("Transfer-Encoding", "chunked")], length=False)
    in_chunks += b"".join(chunk(body[i : i + 70_000]) for i in range(0, len(body), 70_000)) + LAST
    for octets in (post(body), in_chunks):
        assert (await gateway.ask(octets)).status == 200
        assert digest(upstream.requests[-1].body) == digest(body)


@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip", "x-own"])
async def test_a_coded_json_body_that_must_be_read_is_415(gateway: Gateway, upstream: RawUpstream, coding: str) -> None:
    """It is neither unpacked nor let through unread: the client is told what to do."""
    answer = await gateway.ask(post(gzip.compress(b'{"model":"m"}'), fields=[("Content-Encoding", coding)]))
    assert (answer.status, answer.get("x-gateway-error")) == (415, "unsupported_media") and not upstream.requests
    assert (await gateway.ask(post(fields=[("Content-Encoding", "identity")]))).status == 200


@pytest.mark.config(
    {**QUIET, "fields": {"kv_transfer_params": "pass", "ec_transfer_params": "pass", "bootstrap_room": "pass"}}
)
async def test_a_coded_json_body_passes_where_nothing_must_be_read(gateway: Gateway, upstream: RawUpstream) -> None:
    """With every rule at pass, a coded body is relayed as it is, and never expanded."""
    for coding, body in CODED.values():
        assert (await gateway.ask(post(body, fields=[("Content-Encoding", coding)]))).status == 200
        assert digest(upstream.requests[-1].body) == digest(body)


@pytest.mark.parametrize("framing", ["chunked", "close", "one chunk"])
async def test_utf8_cut_at_each_octet(gateway: Gateway, upstream: RawUpstream, framing: str) -> None:
    """A character that comes in pieces arrives as it was, also one that is none."""
    text = EVENT + b"data: \xff\xfe \xf0\x9f\n\n" + b"data: [DONE]\n\n"

    async def in_two(wire: HttpWire, request: Message) -> None:
        cut = int(request.get("x-cut") or 0)
        if framing == "chunked":
            await wire.send_pieces(
                head(200, [SSE_TYPE, ("transfer-encoding", "chunked")]) + chunk(text[:cut]),
                chunk(text[cut:]) + LAST,
                gap=0.001,
            )
        elif framing == "one chunk":
            whole = chunk(text)
            at = whole.index(b"\r\n") + 2 + cut
            await wire.send_pieces(
                head(200, [SSE_TYPE, ("transfer-encoding", "chunked")]) + whole[:at], whole[at:] + LAST, gap=0.001
            )
        else:
            await wire.send_pieces(head(200, [SSE_TYPE]) + text[:cut], text[cut:], gap=0.001)
            wire.fin()

    upstream.script = in_two
    for cut in range(1, len(text)):
        answer = await gateway.ask(post(fields=[("X-Cut", str(cut))]))
        assert answer.body == text and answer.complete
