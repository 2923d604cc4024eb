"""One stream out of two answers: wherever the first is cut, what passes is whole events and its text is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.continuation import CHAT, COMPLETIONS, continuation
from gateway.core.framing import LAST_CHUNK, ChunkedReader, frame
from gateway.core.outcome import Outcome
from gateway.core.seam import TEXT_MOST, Seam

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
DONE = b"data: [DONE]\n\n"
WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=6), min_size=1, max_size=6)


def seam(**more: Any) -> Seam:
    found = continuation(CHAT, json.dumps({**json.loads(BODY), **more}).encode())
    assert found is not None
    return Seam(found)


def event(number: int = 1, **choice: Any) -> bytes:
    made = {"id": f"c-{number}", "object": "x", "created": number, "model": f"m{number}", "choices": [{"index": 0, **choice}]}
    return b"data: %b\n\n" % json.dumps(made, ensure_ascii=False).encode()


def stream(words: list[str], number: int = 1, end: str | None = "stop") -> list[bytes]:
    said = [event(number, delta={"content": word}, finish_reason=None) for word in words]
    ended = [] if end is None else [event(number, delta={"content": ""}, finish_reason=end), DONE]
    return [event(number, delta={"role": "assistant", "content": ""}), *said, *ended]


def octets(events: list[bytes], whole: bool = True) -> bytes:
    return b"".join(map(frame, events)) + (LAST_CHUNK if whole else b"")


def passed(out: bytes) -> list[dict[str, Any]]:
    reader = ChunkedReader()
    body = b"".join(reader.feed(out))
    assert reader.failure is None
    assert body.endswith(b"\n\n") or not body
    return [json.loads(one[6:]) for one in body.split(b"\n\n") if one and one != DONE.strip()]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@given(WORDS, WORDS, st.data())
def test_cut_anywhere(words: list[str], more: list[str], data: st.DataObject) -> None:
    whole = octets(stream(words), whole=False)
    cut = data.draw(st.integers(0, len(whole)))
    joint = seam()
    out = b""
    at = 0
    while at < cut:
        size = data.draw(st.integers(1, cut - at))
        joint.feed(whole[at : at + size])
        out, at = out + joint.out, at + size
    before = passed(out)
    asked = joint.body()
    ended = any(chunk["choices"][0].get("finish_reason") for chunk in before)
    assert (asked is None) == ended
    if asked is None:
        return
    messages = json.loads(asked)["messages"]
    assert text_of(before) == (messages[1]["content"] if len(messages) > 1 else "")
    joint.go_on()
    second = octets(stream(more, 2))
    half = data.draw(st.integers(0, len(second)))
    for piece in (second[:half], second[half:]):
        joint.feed(piece)
        out += joint.out
    assert joint.done
    assert out.endswith(frame(DONE) + LAST_CHUNK)
    chunks = passed(out)
    assert text_of(chunks) == text_of(before) + "".join(more)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["id"] == ("c-1" if before else "c-2")
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_whole_stream_passes_as_it_came(size: int) -> None:
    whole = octets([b": comment\n\n", *stream(["a", "b"])])
    joint, out = seam(), b""
    for at in range(0, len(whole), size):
        joint.feed(whole[at : at + size])
        out += joint.out
    assert (out, joint.done, joint.broke) == (whole, True, None)


@pytest.mark.parametrize(
    ("last", "broke"),
    [
        ([event(delta={}, finish_reason="abort"), DONE], Outcome.STREAM_ERROR),
        ([event(delta={"content": "x"}, finish_reason="error"), DONE], Outcome.STREAM_ERROR),
        ([b'data: {"error": {"code": 500}}\n\n', DONE], Outcome.STREAM_ERROR),
        ([DONE], Outcome.STREAM_ERROR),
        ([], Outcome.UPSTREAM_TRUNCATED),
        ([b"data: {"], Outcome.UPSTREAM_TRUNCATED),
    ],
)
def test_what_is_no_end(last: list[bytes], broke: Outcome) -> None:
    """It is held back, and passes as it came where nobody goes on."""
    joint = seam()
    pieces = joint.feed(octets([*stream(["a"], end=None), *last]))
    assert pieces == stream(["a"], end=None)
    assert (joint.broke, joint.ended, joint.done) == (broke, True, False)
    assert joint.body() is not None
    assert b"".join(joint.give_up()) == b"".join(last)
    assert joint.done


@pytest.mark.parametrize(
    "odd",
    [
        event(delta={"reasoning": "hm"}), event(delta={"reasoning_content": "hm"}), event(delta={"tool_calls": [{"index": 0}]}),
        event(index=1, delta={"content": "a"}), b"data: what\n\n", b"event: x\ndata: {}\n\n",
        b"data: " + b"x" * 70_000 + b"\n\n",
        b'data: {"error": {"code": 400}}\n\n', event(delta={"content": "x" * (TEXT_MOST + 1)}),
    ],
)  # fmt: skip
def test_what_is_never_gone_on_with(odd: bytes) -> None:
    """All passes as it came from then on, an end that is none too."""
    joint = seam()
    sent = octets([*stream(["a"], end=None), odd, *stream(["b"], end="abort")[1:]])
    got = b"".join(joint.feed(sent))
    assert got == b"".join([*stream(["a"], end=None), odd, *stream(["b"], end="abort")[1:]])
    assert (joint.lost, joint.done, joint.broke, joint.body()) == (True, True, None, None)


def counted(text: str, tokens: int, prompt: int = 5, number: int = 1, **choice: Any) -> bytes:
    made = {"id": number, "choices": [{"index": 0, "delta": {"content": text}, **choice}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
                      "prompt_tokens_details": {"cached_tokens": 4}}}  # fmt: skip
    return b"data: %b\n\n" % json.dumps(made).encode()


def test_tokens_without_text_are_generated_again() -> None:
    """Half a character's tokens have been counted, and nobody has seen them."""
    joint = seam(max_tokens=10, stream_options={"include_usage": True})
    joint.feed(octets([counted("a", 1), counted("b", 2), counted("", 3)], whole=False))
    asked = joint.body()
    assert asked is not None
    assert json.loads(asked)["max_tokens"] == 8
    joint.go_on()
    pieces = joint.feed(octets([counted("c", 2, 9, 2), counted("", 3, 9, 2, finish_reason="stop"), DONE]))
    usages = [json.loads(piece[6:])["usage"] for piece in pieces[:-1]]
    assert usages == [{"prompt_tokens": 5, "completion_tokens": n, "total_tokens": 5 + n} for n in (4, 5)]
    assert {json.loads(piece[6:])["id"] for piece in pieces[:-1]} == {1}


def test_tokens_by_their_ids() -> None:
    joint = seam(max_tokens=10)
    joint.feed(octets([event(delta={"content": "ab"}, token_ids=[1, 2]), event(delta={"content": ""}, token_ids=[3])], False))
    assert json.loads(joint.body() or b"")["max_tokens"] == 8
    joint.feed(octets([event(delta={"content": "c"}, token_ids=[4])], False))
    assert json.loads(joint.body() or b"")["max_tokens"] == 6
    joint.feed(octets([event(delta={"content": "d"})], False))
    assert joint.body() is None  # one of them was not counted


def completion(prompt: Any, **more: Any) -> Seam:
    asked = {"model": "m", "prompt": prompt, "stream": True, "return_token_ids": True, "max_tokens": 20, **more}
    found = continuation(COMPLETIONS, json.dumps(asked).encode())
    assert found is not None
    return Seam(found)


def said(text: str, ids: list[int] | None, number: int = 1, **choice: Any) -> bytes:
    return event(number, text=text, token_ids=ids, finish_reason=None, **choice)


@pytest.mark.parametrize("prompt", ["ab", [5, 6]])
def test_a_completion_goes_on_from_its_tokens(prompt: Any) -> None:
    """Text may be cut into other tokens than it came as. Those without a text yet are not with the client."""
    joint = completion(prompt)
    joint.feed(octets([said("c", [7], prompt_token_ids=[5, 6]), said("", [8]), said("d", [9]), said("", [10])], False))
    asked = json.loads(joint.body() or b"")
    assert (asked["prompt"], asked["max_tokens"]) == ([5, 6, 7, 8, 9], 17)
    joint.go_on()
    (piece,) = joint.feed(octets([said("e", [11], 2, prompt_token_ids=[5, 6, 7, 8, 9])], False))
    assert json.loads(piece[6:])["choices"][0]["prompt_token_ids"] is None  # the client's own has been told
    assert json.loads(piece[6:])["choices"][0]["token_ids"] == [11]
    joint.feed(octets([said("f", [12], 2)], False))
    asked = json.loads(joint.body() or b"")
    assert (asked["prompt"], asked["max_tokens"]) == ([5, 6, 7, 8, 9, 11, 12], 15)


@pytest.mark.parametrize(
    "events",
    [
        [said("c", [7, 8], prompt_token_ids=[5, 6])],  # the second may be half of a character
        [said("c", None, prompt_token_ids=[5, 6]), said("", [8])],
        [said("c", [7])],
    ],
    ids=["several at once", "untold", "the prompt's are untold"],
)
def test_a_completion_goes_on_from_its_text_where_tokens_are_not_all_known(events: list[bytes]) -> None:
    joint = completion("ab", max_tokens=None)
    joint.feed(octets(events, False))
    assert json.loads(joint.body() or b"")["prompt"] == "abc"
    joint.go_on()
    joint.feed(octets([said("d", [9], 2, prompt_token_ids=[1, 2, 3])], False))
    assert json.loads(joint.body() or b"")["prompt"] == "abcd"
    joint = completion([5, 6], max_tokens=None)
    joint.feed(octets(events, False))
    assert (joint.body() is None) == (len(events) > 1 or b"8" in events[0])


def test_usage_of_an_answer_that_had_not_begun_is_its_own() -> None:
    joint = seam(max_tokens=10, stream_options={"include_usage": True})
    joint.feed(octets(stream([], end=None), whole=False))
    joint.go_on()
    (piece,) = joint.feed(octets([counted("c", 1, 9, 2)], whole=False))
    assert json.loads(piece[6:])["usage"]["prompt_tokens"] == 9
    assert json.loads(joint.body() or b"")["max_tokens"] == 9
