"""Body: single members change, every other octet stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.disagg.asked import OWNED
from gateway.core.disagg.base import Handoff
from gateway.core.disagg.body import Body
from gateway.core.disagg.nixl import Nixl
from gateway.errors import Refusal
from tests.core.disagg.support import CHAT, PAIR, ask


@pytest.mark.parametrize(
    ("body", "put", "drop", "becomes"),
    [
        (b"{}", {}, "", b"{}"),
        (b"{}", {"k": b"1"}, "", b'{"k": 1}'),
        (b'{"a":1}', {"k": b"2"}, "", b'{"a":1, "k": 2}'),
        (b'{"a":1}', {"a": b"2"}, "", b'{"a":2}'),
        (b'{"a":1}', {"k": b"2"}, "a", b'{"k": 2}'),
        (b'{"a":1 , "b":2\n, "c":3}', {}, "a", b'{"b":2\n, "c":3}'),
        (b'{"a":1 , "b":2\n, "c":3}', {}, "b", b'{"a":1\n, "c":3}'),
        (b'{"a":1 , "b":2\n, "c":3 }', {}, "c", b'{"a":1 , "b":2 }'),
        (b'{"a":1,"b":2,"c":3}', {}, "abc", b"{}"),
        (b'{"a":1,"b":2,"c":3,"d":4}', {}, "bc", b'{"a":1,"d":4}'),
        (b'{"a":1,"b":2,"a":3}', {"a": b"9"}, "", b'{"a":9,"b":2}'),  # a doubled one is there once
        (b'{"a":1,"b":2,"a":3}', {}, "a", b'{"b":2}'),
        (b'{"\\u0061":1,"b":2}', {"a": b"9"}, "", b'{"\\u0061":9,"b":2}'),  # by what the key says, not by how it is written
        (b'\xef\xbb\xbf {"a":1}\n', {"a": b"2"}, "", b'\xef\xbb\xbf {"a":2}\n'),
    ],
)  # fmt: skip
def test_edited(body: bytes, put: dict[str, bytes], drop: str, becomes: bytes) -> None:
    assert Body(body).edited(put, set(drop)) == becomes


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from([1e-5, 0.1, 1e22]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["a", "b", "kv_transfer_params", "bootstrap_room", "ec_transfer_params", "stream_x", "é\"\\"])
blanks = st.sampled_from(["", " ", "\n\t", "  "])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, Any]]]:
    """A body written in any manner, doubled keys included, and its members in order."""
    pairs = draw(st.lists(st.tuples(keys, values), max_size=6))
    text = ",".join(
        "".join((draw(blanks), json.dumps(key, ensure_ascii=draw(st.booleans())), draw(blanks), ":", draw(blanks),
                 json.dumps(value, ensure_ascii=draw(st.booleans())), draw(blanks)))
        for key, value in pairs
    )  # fmt: skip
    return f"{draw(blanks)}{{{text}}}{draw(blanks)}".encode("utf-8", "surrogatepass"), pairs


@given(
    st.dictionaries(keys, values, max_size=6),
    st.sampled_from([(", ", ": "), (",", ":")]),
    st.booleans(),
    st.dictionaries(st.sampled_from(["a", "stream_x", "new", "newer"]), st.just(b"[1, 2]")),
    st.sets(keys),
)
def test_how_it_is_laid_out_is_no_matter(
    members: dict[str, Any], layout: tuple[str, str], plain: bool, put: dict[str, bytes], drop: set[str]
) -> None:
    """What clients' libraries write is edited without a look at places, with the same outcome."""
    octets = json.dumps(members, separators=layout, ensure_ascii=plain).encode()
    assert Body(octets).edited(put, drop) + b"\n" == Body(octets + b"\n").edited(put, drop)


@given(bodies())
def test_the_decode_body_is_the_clients_own(given_: tuple[bytes, list[tuple[str, Any]]]) -> None:
    """Less its owned members it is the client's, in value and order; and its octets are the client's but for one splice."""
    octets, pairs = given_
    own = [(key, value) for key, value in pairs if key not in OWNED]
    leg = Nixl().decode(ask(CHAT, octets), PAIR, Handoff(b'{"x":9007199254740993}'))
    found = json.loads(leg.body, object_pairs_hook=list)
    assert [pair for pair in found if pair[0] not in OWNED] == [
        pair for pair in json.loads(octets, object_pairs_hook=list) if pair[0] not in OWNED
    ]
    assert [pair for pair in found if pair[0] in OWNED] == [("kv_transfer_params", [("x", 9007199254740993)])]
    if own == pairs:
        splice = (b", " if pairs else b"") + b'"kv_transfer_params": {"x":9007199254740993}'
        at = leg.body.index(splice)
        assert leg.body[:at] + leg.body[at + len(splice) :] == octets


@given(bodies(), st.sets(keys))
def test_dropped_and_put(given_: tuple[bytes, list[tuple[str, Any]]], names: set[str]) -> None:
    octets, pairs = given_
    edited = Body(octets).edited({"a": b"[1]"}, set(names))
    found = json.loads(edited, object_pairs_hook=list)
    kept = [key for key, _ in pairs if key not in names and key != "a"]
    assert [key for key, _ in found if key != "a"] == kept
    assert [value for key, value in found if key == "a"] == [[1]]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":1}x', b'{"a" 1}'])
def test_no_object(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        Body(body)
    assert refused.value.code == "bad_request"


def test_values() -> None:
    long = b'"%b"' % (b"x" * 5000)
    body = Body(b'{"big": 9007199254740993, "null": null, "o": {"i": 1}, "nan": NaN, "s": "\\ud800", "long": %b}' % long)
    assert body.value("big") == 9007199254740993
    assert body.raw("null") is None and body.value("null") is None and "null" in body
    assert body.raw("missing") is None
    inner = body.inner("o")
    assert inner is not None and inner.value("i") == 1
    assert body.inner("big") is None
    assert body.value("nan") != body.value("nan")
    assert body.value("s") == "\ud800"
    assert body.raw("long") == long
