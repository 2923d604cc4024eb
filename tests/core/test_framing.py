"""Where bodies end: chunked framing in any pieces, and requests one behind the other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.framing import (
    LAST_CHUNK,
    SIZE_LINE,
    TRAILERS,
    ChunkedReader,
    CloseReader,
    LengthReader,
    RequestReader,
    frame,
)
from gateway.core.head import Framing, Malformed, RequestHead
from gateway.errors import Refusal

LIMIT = 65536


def splits(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`data` cut at these places."""
    places = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def at_every_octet(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@dataclasses.dataclass
class Read:
    """What a reader made of some pieces."""

    payload: bytes
    out: bytes
    done: bool
    extra: bytes
    failed: bool
    same: bool  # each feed's `out` was the very octets fed


def read(pieces: Iterable[bytes]) -> Read:
    """Feed the pieces to one reader, as a relay does: up to its end or its failure."""
    reader, payload, out, same = ChunkedReader(), b"", b"", True
    for piece in pieces:
        payload += b"".join(reader.feed(piece))
        same = same and reader.out is piece
        out += reader.out
        if reader.failure is not None:
            break
    return Read(payload, out, reader.done, reader.extra, reader.failure is not None, same)


TOKEN = st.text("abcXYZ019!#$%&'*+-.^_`|~", min_size=1, max_size=8).map(str.encode)
QUOTED = st.text("abc ;=,\t", max_size=8).map(lambda t: b'"%b"' % t.encode())
EXTENSION = st.builds(
    lambda bws, name, val: bws + b";" + name + val,
    st.sampled_from([b"", b" ", b"\t "]),
    TOKEN,
    st.one_of(st.just(b""), TOKEN.map(lambda v: b"=" + v), QUOTED.map(lambda v: b"=" + v)),
)
SIZE = st.sampled_from(["%x", "%X", "0%x", "000%X", "%08x", "%016x"])
CHUNK = st.builds(
    lambda size, extensions, data: (size % len(data)).encode() + b"".join(extensions) + b"\r\n" + data + b"\r\n",
    SIZE,
    st.lists(EXTENSION, max_size=2),
    st.binary(min_size=1, max_size=40),
)
TRAILER = st.builds(
    lambda name, value: b"X-" + name + b": " + value + b"\r\n",
    TOKEN,
    st.sampled_from([b"", b"1", b"a b", b"caf\xe9", b"Transfer-Encoding: chunked"]),
)
LAST = st.sampled_from([b"0", b"00", b"0000000000", b"0;a=b", b"0 ;a"])


@st.composite
def chunked(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A valid chunked body, and its payload."""
    body, payload = b"", b""
    for whole in draw(st.lists(CHUNK, max_size=5)):
        body += whole
        payload += whole[whole.index(b"\r\n") + 2 : -2]
    trailers = b"".join(draw(st.lists(TRAILER, max_size=2)))
    return body + draw(LAST) + b"\r\n" + trailers + b"\r\n", payload


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@settings(max_examples=150)
@given(chunked(), CUTS)
def test_any_split_gives_the_same_payload(message: tuple[bytes, bytes], cuts: list[int]) -> None:
    """However a valid body is cut, its payload and its end are the same."""
    body, payload = message
    for pieces in ([body], splits(body, cuts), at_every_octet(body)):
        got = read(pieces)
        assert (got.payload, got.done, got.extra, got.failed) == (payload, True, b"", False)


@settings(max_examples=150)
@given(chunked(), CUTS)
def test_out_is_the_same_payload_framed_plainly(message: tuple[bytes, bytes], cuts: list[int]) -> None:
    """What goes on to the next hop holds no extension and no trailer, and spells the same payload."""
    body, payload = message
    for pieces in ([body], splits(body, cuts), at_every_octet(body)):
        out = read(pieces).out
        again = read([out])
        assert (again.payload, again.done, again.failed, again.extra) == (payload, True, False, b"")
        assert out.endswith(LAST_CHUNK)
        for line in size_lines(out):
            assert line and not set(line) - set(b"0123456789abcdefABCDEF") and len(line) <= 8, line


def size_lines(body: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        found.append(body[at:end])
        at = end + 4 + int(body[at:end], 16)
    return found


@settings(max_examples=150)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), CUTS)
def test_plain_frames_pass_as_the_very_object(payloads: list[bytes], cuts: list[int]) -> None:
    """Where nothing had to be changed, `out` is the object that was fed, not a copy; however it was cut, it adds up."""
    frames = [frame(p) for p in payloads]
    body = b"".join(frames) + LAST_CHUNK
    assert read([body]).same
    assert read([*frames, LAST_CHUNK]).same
    assert read([(b"".join(frames)) or LAST_CHUNK]).same
    assert read([read(splits(body, cuts)).out]).payload == b"".join(payloads)


@pytest.mark.seconds(5)
def test_a_size_line_cut_within_its_end_is_waited_for() -> None:
    """A read that ends in the CR of a size line met before, behind a frame of any length, takes up nothing twice."""
    for first, second in itertools.product(range(1, 20), repeat=2):
        body = frame(b"a" * first) + frame(b"b" * second) + LAST_CHUNK
        assert read([body]).done  # both sizes are known from now on
        for cut in range(1, len(body)):
            got = read([body[:cut], body[cut:]])
            assert (got.payload, got.done, got.extra) == (b"a" * first + b"b" * second, True, b""), (first, second, cut)


@settings(max_examples=150)
@given(chunked(), CUTS, st.binary(min_size=1, max_size=30))
def test_what_lies_behind_is_kept_and_never_passed(message: tuple[bytes, bytes], cuts: list[int], tail: bytes) -> None:
    """Octets behind the last chunk are `extra`: no part of the payload, and not of what goes on."""
    body, payload = message
    for pieces in ([body + tail], splits(body + tail, cuts), at_every_octet(body + tail)):
        got = read(pieces)
        assert (got.payload, got.extra, got.done, got.failed) == (payload, tail, True, False)
        assert read([got.out]).extra == b""


@settings(max_examples=100)
@given(chunked(), st.integers(0, 10_000))
def test_a_body_that_is_cut_short_is_not_done(message: tuple[bytes, bytes], place: int) -> None:
    """A prefix is never complete, nothing of it is invented, and what went on is a prefix of the payload too."""
    body, payload = message
    prefix = body[: place % len(body)]
    for pieces in ([prefix], at_every_octet(prefix)):
        got = read(pieces)
        assert not got.done and not got.failed and payload.startswith(got.payload)
        assert not read([got.out]).done and read([got.out]).payload == got.payload


BAD_SIZE_LINES = [
    b"zz\r\n",
    b"-1\r\n",
    b"+5\r\n",
    b"0x5\r\n",
    b"5g\r\n",
    b" 5\r\n",
    b"\t5\r\n",
    b"5 \r\n",
    b"5\t\r\n",
    b"\r\n",
    b"5 5\r\n",
    b"5\n",
    b"5\r\r\n",
    b"5;a\n",
    b"5;a\x00b\r\n",
    b"5;a\rb\r\n",
    b"5;\x0b\r\n",
    b"5;a\x7f\r\n",
    b";a\r\n",
    b" ;a\r\n",
    b"5_0\r\n",
    b"5.0\r\n",
    b"5,5\r\n",
    b'"5"\r\n',
    b"\xd9\xa5\r\n",
    b"\xef\xbc\x95\r\n",
    b"FFFFFFFFFFFFFFFFF\r\n",
    b"8000000000000000\r\n",
    b"FFFFFFFFFFFFFFFF\r\n",
    b"0" * 17 + b"\r\n",
    b"5;" + b"a" * SIZE_LINE + b"\r\n",
    b"2;\nxx\r\n",
    b'5;a="\n"\r\n',
    b'5;a="x\ry"\r\n',
    b"\x005\r\n",
    b"5\x00\r\n",
]
HELLO = b"5\r\nhello\r\n"
MALFORMED = [
    *(line + b"hello\r\n" for line in BAD_SIZE_LINES),
    *(HELLO + line + b"world\r\n" for line in BAD_SIZE_LINES),
    b"4\r\nhello\r\n0\r\n\r\n",
    b"6\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello0\r\n\r\n",
    b"5\r\nhello\n0\r\n\r\n",
    b"5\r\nhello\r0\r\n\r\n",
    b"5\r\nhello\n\r0\r\n\r\n",
    b"5\nhello\r\n0\r\n\r\n",
    HELLO + b"0\n\r\n",
    HELLO + b"0\r\n\n",
    HELLO + b"0\r\n X: y\r\n\r\n",
    HELLO + b"0\r\nX y\r\n\r\n",
    HELLO + b"0\r\nX : y\r\n\r\n",
    HELLO + b"0\r\nX: y\nZ: w\r\n\r\n",
    HELLO + b"0\r\nX: y\rZ\r\n\r\n",
    HELLO + b"0\r\nX: \x00\r\n\r\n",
    HELLO + b"0\r\n: y\r\n\r\n",
    HELLO + b"0\r\nX: y\r\n z\r\n\r\n",
    HELLO + b"0\r\n\rX\r\n\r\n",
    HELLO + b"0\r\nGET / HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda b: repr(b[:28]))
def test_a_malformed_body_fails_at_every_split(body: bytes) -> None:
    """No cut makes a malformed body a valid one, and what passed before the fault is the same payload."""
    whole = read([body])
    assert whole.failed and not whole.done
    cuts = range(1, len(body)) if len(body) < 200 else (1, 2, 5, 4095, 4096, 4097, len(body) - 1)
    for cut in cuts:
        got = read([body[:cut], body[cut:]])
        assert got.failed and not got.done, cut
    assert read(at_every_octet(body)).failed
    assert not read([whole.out]).done


@pytest.mark.parametrize("line", BAD_SIZE_LINES, ids=lambda b: repr(b[:28]))
def test_a_size_line_that_is_none_is_refused_without_more(line: bytes) -> None:
    """Nothing more need come: the peer that sent half a message and waits is told at once."""
    assert read([line]).failed
    assert read(at_every_octet(line)).failed


def test_a_wrong_line_end_behind_data_is_refused_at_its_octet() -> None:
    """A chunk longer than its size fails with its first octet too many."""
    assert read([b"4\r\nhello"]).failed
    assert not read([b"4\r\nhell"]).failed
    assert read([b"4\r\nhell", b"o"]).failed


def test_trailers_are_bounded_however_they_come() -> None:
    """A trailer section beyond its limit is refused, whether it comes whole or octet by octet."""
    large = HELLO + b"0\r\nX: " + b"a" * (TRAILERS + 100) + b"\r\n\r\n"
    assert read([large]).failed
    assert read([large[:-1], large[-1:]]).failed
    assert read([large[i : i + 1000] for i in range(0, len(large), 1000)]).failed
    small = HELLO + b"0\r\nX: " + b"a" * (TRAILERS - 100) + b"\r\n\r\n"
    assert read([small]).done and read([small[i : i + 1000] for i in range(0, len(small), 1000)]).done


def test_endless_extensions_and_trailers_are_bounded() -> None:
    """A size line or a trailer that never ends fails soon, whatever the pieces."""
    for start in (b"5;", HELLO + b"0\r\nX: "):
        reader = ChunkedReader()
        reader.feed(start)
        fed = 0
        while reader.failure is None:
            reader.feed(b"a" * 100)
            fed += 100
            assert fed < 20_000
        assert isinstance(reader.failure, Malformed)


@given(st.binary(max_size=60), st.integers(0, 60), CUTS)
def test_a_body_of_known_length_ends_there(data: bytes, length: int, cuts: list[int]) -> None:
    """What is within the length passes, what is behind it is `extra`."""
    reader, out = LengthReader(length), b""
    assert reader.done == (length == 0)
    pieces = b""
    for piece in splits(data, cuts):
        pieces += b"".join(reader.feed(piece))
        out += reader.out
        if reader.done:
            break
    fed = data[: len(pieces) + len(reader.extra)]
    assert pieces == out == data[:length] and reader.extra == fed[length:]
    assert reader.done == (len(data) >= length)


@given(st.binary(max_size=60), CUTS)
def test_a_close_delimited_body_is_framed_anew(data: bytes, cuts: list[int]) -> None:
    """Each read becomes a chunk, and only the connection's end makes it done."""
    reader, out = CloseReader(), b""
    for piece in splits(data, cuts):
        reader.feed(piece)
        out += reader.out
    assert not reader.done
    assert read([out + LAST_CHUNK]).payload == data


# --- requests, one behind the other


@dataclasses.dataclass
class Served:
    heads: list[RequestHead] = dataclasses.field(default_factory=list)
    bodies: list[bytes] = dataclasses.field(default_factory=list)
    refusal: Refusal | Malformed | None = None


def serve(pieces: Iterable[bytes], limit: int = LIMIT) -> Served:
    """Read requests as a connection does: the next one is taken up when the one in hand has its whole body."""
    reader, served = RequestReader(limit), Served()
    try:
        for piece in pieces:
            feed(reader, served, piece)
    except (Refusal, Malformed) as refusal:
        served.refusal = refusal
    return served


def feed(reader: RequestReader, served: Served, piece: bytes) -> None:
    while True:
        if not reader.busy:
            found = reader.head(piece)
            piece = b""
            if found is None:
                return
            served.heads.append(found)
            served.bodies.append(b"")
        if reader.in_body:
            pieces, complete = reader.body(piece)
            piece = b""
            served.bodies[-1] += b"".join(pieces)
            if not complete:
                return
        elif piece:
            reader.keep(piece)
            piece = b""
        reader.next_request()
        if not reader.held:
            return


@pytest.mark.parametrize("behind", [b"", b"GET /b HTTP/1.1\r\nHo"])
def test_a_body_that_came_along_is_had_whole(behind: bytes) -> None:
    """`whole_body` gives it where all of it is here, and `body` reads it where it is not."""
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n"
    reader = RequestReader(LIMIT)
    assert reader.head(head + b"hello" + behind) is not None
    assert reader.whole_body() == b"hello"
    assert (reader.in_body, reader.ahead, reader.whole_body()) == (False, len(behind), None)
    assert reader.take() == behind
    reader = RequestReader(LIMIT)
    assert reader.head(head + b"hell") is not None
    assert reader.whole_body() is None and reader.in_body
    assert reader.body(b"o" + behind) == ([b"hello"], True) and reader.take() == behind
    for other in (b"", b"Transfer-Encoding: chunked\r\n"):
        reader = RequestReader(LIMIT)
        assert reader.head(b"POST /v1/x HTTP/1.1\r\nHost: a\r\n" + other + b"\r\n" + LAST_CHUNK) is not None
        assert reader.whole_body() is None and reader.take() == LAST_CHUNK


BODY = st.binary(max_size=30)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """Several requests as one octet string, and their bodies."""
    octets, bodies = b"", []
    for body in draw(st.lists(BODY, min_size=1, max_size=4)):
        kind = draw(st.sampled_from(["none", "length", "chunked"]))
        head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\n"
        if kind == "none":
            octets, body = octets + head + b"\r\n", b""
        elif kind == "length":
            octets += head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        else:
            octets += head + b"Transfer-Encoding: chunked\r\n\r\n" + (frame(body) if body else b"") + LAST_CHUNK
        bodies.append(body)
    return octets, bodies


@settings(max_examples=200)
@given(requests(), CUTS)
def test_pipelined_requests_are_told_apart_at_any_split(message: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    """Each request gets exactly its own body, in order, however the octets are cut."""
    octets, bodies = message
    for pieces in ([octets], splits(octets, cuts), at_every_octet(octets)):
        served = serve(pieces)
        assert served.refusal is None and served.bodies == bodies


def test_octets_ahead_wait_for_their_turn() -> None:
    """While a request is in hand, what follows it is kept and counted, and not looked at."""
    reader = RequestReader(LIMIT)
    assert reader.head(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n") is not None
    reader.keep(b"GET /b HTTP/1.1\r\nHo")
    assert (reader.busy, reader.ahead, reader.begun) == (True, 19, False)
    reader.next_request()
    assert (reader.busy, reader.ahead, reader.begun) == (False, 0, True)
    found = reader.head(b"st: h\r\n\r\n")
    assert found is not None and found.target == b"/b"


@pytest.mark.parametrize("empty", [b"\r\n", b"\r\n\r\n", b"\r\n\r\n\r\n"])
def test_empty_lines_before_a_request_mean_the_same_at_every_split(empty: bytes) -> None:
    """RFC 9112 section 2.2: empty lines before a request are skipped, or they are not; that depends on no cut."""
    request = empty + b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
    whole = serve([request])
    outcomes = {
        (len(s.heads), s.refusal is not None) for cut in range(len(request) + 1) for s in [serve(splits(request, [cut]))]
    }
    outcomes.add((len(whole.heads), whole.refusal is not None))
    each = serve(at_every_octet(request))
    outcomes.add((len(each.heads), each.refusal is not None))
    assert len(outcomes) == 1, outcomes


def code(served: Served) -> str:
    assert isinstance(served.refusal, Refusal), served
    return served.refusal.code


def test_limits_hold_for_what_comes_in_pieces_too() -> None:
    """A target without end is 414, fields without end are 431; the head's own limit is exact."""
    long_target = b"GET /" + b"a" * 3000
    many = b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 3000
    for size in (1, 7, 1000, 5000):
        assert code(serve([long_target[i : i + size] for i in range(0, len(long_target), size)], 2048)) == "target_too_long"
        assert code(serve([many[i : i + size] for i in range(0, len(many), size)], 2048)) == "headers_too_large"
    start, end = b"GET / HTTP/1.1\r\nHost: h\r\nX: ", b"\r\n\r\n"
    for length, fits in ((2048, True), (2049, False)):
        request = start + b"a" * (length - len(start) - len(end)) + end
        for pieces in ([request], at_every_octet(request), [request[:-1], request[-1:]]):
            served = serve(pieces, 2048)
            assert (len(served.heads) == 1) == fits
            assert fits or code(served) == "headers_too_large"


@pytest.mark.parametrize(
    "begun",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00",
        b" GET / HTTP/1.1",
        b"\tGET",
        b"\nGET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\n",
        b"GET / HTTP/1.1\nHost: h\n\n",
        b"(GET",
        b"\xff\xfe",
        b"GET / HTTP/1.1\r\nHost: h\n\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: a\nY: b\n\n",
    ],
    ids=repr,
)
def test_what_can_never_become_a_head_is_refused_at_once(begun: bytes) -> None:
    """TLS on this port, a bare line end: told now, not at the deadline."""
    for pieces in ([begun], at_every_octet(begun)):
        served = serve(pieces)
        assert not served.heads and code(served) == "bad_request"


def test_a_malformed_body_is_told_and_nothing_follows() -> None:
    """A chunk of the wrong size ends the reading: what is behind it never becomes a request."""
    request = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhello\r\n0\r\n\r\n"
    request += b"GET /x HTTP/1.1\r\n"
    for pieces in ([request], at_every_octet(request)):
        served = serve(pieces)
        assert len(served.heads) == 1 and isinstance(served.refusal, Malformed)
    assert serve([request]).heads[0].framing is Framing.CHUNKED
