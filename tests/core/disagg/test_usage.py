"""The rewriting of cached_tokens (case 41): off is off; on, one event changes, and what is not known is taken out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.disagg.body import Body
from gateway.core.disagg.usage import CachedTokens, corrected
from tests.support import script as s

A, B = s.delta("a"), s.delta("b", finish="stop")
CONTINUOUS = s.event({"choices": [{"index": 0, "delta": {"content": "x"}}],
                      "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}})  # fmt: skip


def usage(details: object, **more: Any) -> bytes:
    return s.event(
        {"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": details, **more}, "z": 1e-5}
    )


def passed(cached: int | None, *pieces: bytes) -> bytes:
    editor = CachedTokens(lambda: cached)
    return b"".join([piece for given in pieces for piece in editor.feed([given])] + editor.end())


@pytest.mark.parametrize(
    ("cached", "given", "becomes"),
    [
        (5, {"cached_tokens": 9}, {"cached_tokens": 5}),
        (0, {"cached_tokens": 9}, {"cached_tokens": 0}),
        (5, None, {"cached_tokens": 5}),
        (5, {"cached_tokens": 9, "audio_tokens": 1}, {"cached_tokens": 5, "audio_tokens": 1}),
        (None, {"cached_tokens": 9}, None),
        (None, {"cached_tokens": 9, "audio_tokens": 1}, {"audio_tokens": 1}),
        (None, None, None),
        (None, {}, {}),
    ],
)
def test_the_last_event(cached: int | None, given: object, becomes: object) -> None:
    """Set where P said one, gone where it did not; wherever the reads cut the stream, and nothing else is touched."""
    stream, expected = A + CONTINUOUS + B + usage(given) + s.DONE, A + CONTINUOUS + B + usage(becomes) + s.DONE
    for at in range(0, len(stream), 7):
        found = passed(cached, stream[:at], stream[at:])
        assert found.startswith(A + CONTINUOUS + B) and found.endswith(s.DONE)
        assert json.loads(found[len(A + CONTINUOUS + B) : -len(s.DONE)][6:]) == json.loads(
            expected[len(A + CONTINUOUS + B) : -len(s.DONE)][6:]
        )


@pytest.mark.parametrize("form", [bytes, lambda d: d.replace(b"\n", b"\r\n")], ids=["lf", "crlf"])
def test_what_stays(form: Any) -> None:
    """Octet for octet: streams without such an event, one without a number to correct, comments, broken JSON."""
    for stream in (A + CONTINUOUS + B + s.DONE, A + usage(None) + s.DONE, b": \"usage\"\n\n" + A, b'data: {"usage": {\n\n' + A,
                   b'data: {"usage":\ndata: {}}\n\n', A + b'data: {"choices": [], "usa'):  # fmt: skip
        assert passed(None, form(stream)) == form(stream)


def test_framing_is_kept() -> None:
    event = b'data:{"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":9}} , "seed":9007199254740993}\r\n\r\n'
    assert passed(2, event) == event.replace(b":9}", b":2}")


@pytest.mark.parametrize("name", ["prompt_tokens_details", "input_tokens_details"])
def test_a_whole_answer(name: str) -> None:
    body = json.dumps({"choices": [{"index": 0}], "usage": {name: {"cached_tokens": 9}}}).encode()
    assert json.loads(corrected(Body(body), 4))["usage"] == {name: {"cached_tokens": 4}}
    assert json.loads(corrected(Body(body), None))["usage"] == {name: None}
    for nothing in (b'{"usage": null}', b"{}", b'{"usage": 5}'):
        assert corrected(Body(nothing), 4) == nothing
    assert json.loads(corrected(Body(b'{"usage": {"input_tokens": 3}}'), 1))["usage"]["input_tokens_details"] == {
        "cached_tokens": 1
    }
