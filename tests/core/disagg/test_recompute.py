"""A dropped answer goes on: what is asked for, what the client sees, and where it is relayed instead (cases 44 and 46)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.continuation import continuation
from gateway.core.disagg.recompute import RESUMED_MOST, RecomputedSeam
from tests.core.disagg.support import CHAT, COMPLETIONS

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Tell me."}
COUNTED = {"stream_options": {"include_usage": True}}


def request(path: bytes = CHAT, **members: Any) -> bytes:
    prompt: dict[str, Any] = {"messages": [SYSTEM, USER]} if path == CHAT else {"prompt": "Once"}
    return json.dumps({"model": "m", **prompt, "stream": True, **members}).encode()


def seam(path: bytes = CHAT, **members: Any) -> RecomputedSeam:
    wanted = continuation(path, request(path, **members))
    assert wanted is not None
    return RecomputedSeam(wanted)


def chunked(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def whole(*events: bytes) -> bytes:
    return chunked(*events) + b"0\r\n\r\n"


def usage(used: int, prompt: int = 9) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": used, "total_tokens": prompt + used}


def event(name: str, delta: Any, finish: str | None = None, stop: object = None, used: int | None = None) -> bytes:
    choice = {"index": 0, ("delta" if isinstance(delta, dict) else "text"): delta, "finish_reason": finish, "stop_reason": stop}
    counted = {"usage": usage(used)} if used is not None else {}
    return b"data: %b\n\n" % json.dumps({"id": name, "choices": [choice], **counted}).encode()


def marker(chat: bool = True, name: str = "one", text: str = "") -> bytes:
    return event(name, {"content": text} if chat else text, "stop", "recomputed")


def told(name: str, used: int, prompt: int = 9) -> bytes:
    """The usage event at a stream's end."""
    return b"data: %b\n\n" % json.dumps({"id": name, "choices": [], "usage": usage(used, prompt)}).encode()


def texts(passed: list[bytes]) -> list[dict[str, Any]]:
    joined = b"".join(passed)
    return [json.loads(each.removeprefix(b"data: ")) for each in joined.split(b"\n\n") if each and b"[DONE]" not in each]


def resumed(of: RecomputedSeam) -> dict[str, Any]:
    """What is asked for, and the seam goes on with the answer to that."""
    asked: dict[str, Any] = json.loads(of.body() or b"")
    of.go_on()
    return asked


ROLE = event("one", {"role": "assistant", "content": ""}, used=0)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("cut", [0, 1, 60, 200, 10_000])
def test_it_goes_on(cut: int) -> None:
    """Case 46, wherever the reads cut: 40 of 100 tokens are there, so 60 are asked for, behind the conversation as it was."""
    of = seam(max_completion_tokens=100)
    body = whole(ROLE, event("one", {"content": "Once upon"}, used=40), marker(), DONE)
    passed = of.feed(body[:cut]) + of.feed(body[cut:])
    assert of.recomputed and of.mendable and of.ended and not of.done
    assert b"recomputed" not in b"".join(passed) and b"[DONE]" not in b"".join(passed)
    assert resumed(of) == json.loads(request()) | {
        "messages": [SYSTEM, USER, {"role": "assistant", "content": "Once upon"}],
        "continue_final_message": True, "add_generation_prompt": False, "max_completion_tokens": 60,
    }  # fmt: skip
    assert not of.recomputed and not of.mendable
    rest = [event("two", {"role": "assistant", "content": ""}, used=0), event("two", {"content": " a time"}, used=3)]
    passed += of.feed(whole(*rest, event("two", {"content": ""}, "stop", used=3), DONE))
    said = texts(passed)
    assert {each["id"] for each in said} == {"one"}
    assert [each["choices"][0]["delta"].get("role") for each in said].count("assistant") == 1
    assert "".join(each["choices"][0]["delta"]["content"] for each in said) == "Once upon a time"
    assert said[-1]["usage"] == usage(43)
    assert passed[-1] == DONE and of.done


def test_completions() -> None:
    of = seam(COMPLETIONS, max_tokens=50)
    of.feed(chunked(event("one", " upon", used=2), marker(False)))
    asked = resumed(of)
    assert (asked["prompt"], asked["max_tokens"]) == ("Once upon", 48)


def test_usage_behind_the_marker_counts() -> None:
    """The usual client asks for usage once, at the end: it tells how much is left, and is said once, of the whole."""
    of = seam(max_tokens=100, **COUNTED)
    passed = of.feed(whole(ROLE, event("one", {"content": "Once"}), marker(), told("one", 40), DONE))
    assert resumed(of)["max_tokens"] == 60
    two = [event("two", {"role": "assistant", "content": ""}), event("two", {"content": " upon"})]
    passed += of.feed(whole(*two, marker(name="two"), told("two", 8, prompt=50), DONE))
    asked = resumed(of)
    assert (asked["max_tokens"], asked["messages"][-1]["content"]) == (52, "Once upon")
    three = [event("three", {"content": " a time"}), event("three", {"content": ""}, "stop")]
    passed += of.feed(whole(*three, told("three", 3, prompt=58), DONE))
    said = texts(passed)
    assert {each["id"] for each in said} == {"one"} and of.done
    assert [each["usage"] for each in said[1:] if each.get("usage")] == [usage(51)]


def test_nothing_had_been_said() -> None:
    """The whole answer is asked for anew, whatever was generated of it."""
    of = seam(max_tokens=100, **COUNTED)
    passed = of.feed(whole(ROLE, marker(), told("one", 2), DONE))
    assert resumed(of) == json.loads(request(max_tokens=100, **COUNTED))
    passed += of.feed(whole(event("two", {"content": "Once"}), marker(name="two"), told("two", 30), DONE))
    assert resumed(of)["max_tokens"] == 70
    passed += of.feed(whole(event("three", {"content": "!"}, "stop"), told("three", 1), DONE))
    assert texts(passed)[-1] == {"id": "one", "choices": [], "usage": usage(31)}


def test_a_marker_with_text() -> None:
    """It has not passed and is generated again: what was counted with it is not with the client."""
    of = seam(max_tokens=100, **COUNTED)
    last = [marker(text=" upon"), told("one", 40), DONE]
    of.feed(whole(event("one", {"content": "Once"}), *last))
    assert of.recomputed and of.body() is None and of.give_up() == [*last, b""]
    other = seam(max_tokens=100)
    other.feed(whole(event("one", {"content": "Once"}, used=30), marker(text=" upon"), DONE))
    asked = resumed(other)
    assert (asked["max_tokens"], asked["messages"][-1]["content"]) == (70, "Once")


def test_no_limit_stays_none() -> None:
    of = seam()
    of.feed(chunked(event("one", {"content": "Once"}), marker()))
    assert not [key for key in resumed(of) if "tokens" in key]


def test_it_is_bounded() -> None:
    """And what passes in the end is one answer's all the same."""
    of = seam(max_tokens=100, **COUNTED)
    for number in range(RESUMED_MOST):
        of.feed(whole(event(f"n{number}", {"content": "x"}), marker(name=f"n{number}"), told(f"n{number}", 1), DONE))
        resumed(of)
    of.feed(whole(event("last", {"content": "x"}), marker(name="last"), told("last", 1, prompt=12), DONE))
    assert of.recomputed and of.spent and of.body() is None
    held = of.give_up()
    said = texts(held)
    assert [each["id"] for each in said] == ["n0", "n0"] and b"".join(held).endswith(DONE)
    assert said[0]["choices"][0]["stop_reason"] == "recomputed"
    assert said[1]["usage"] == usage(4)
    assert of.done


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}]
)
def test_relayed_where_there_is_more_than_text(delta: dict[str, Any]) -> None:
    """Case 44: the marker passes, as without the option."""
    of = seam()
    body = [ROLE, event("one", delta), marker(), DONE]
    passed = of.feed(whole(*body))
    assert passed == body and of.done and not of.recomputed and not of.mendable and of.body() is None
    late = seam()
    mixed = b"data: %b\n\n" % json.dumps(
        {"id": "one", "choices": [{"index": 0, "delta": delta, "finish_reason": "stop", "stop_reason": "recomputed"}]}
    ).encode()
    assert b"".join(late.feed(whole(ROLE, mixed, DONE))) == ROLE + mixed + DONE and late.done


def test_relayed_where_the_count_is_not_known() -> None:
    of = seam(max_tokens=100)
    of.feed(chunked(event("one", {"content": "Once"}), marker()))
    assert of.recomputed and of.body() is None
    assert of.give_up() == [marker()]


@pytest.mark.parametrize(
    "end",
    [
        event("one", {"content": ""}, "abort"),
        b'data: {"error": {"message": "boom", "code": 500}}\n\n',
        b'data: {"error": {"message": "no", "code": 400}}\n\n',
    ],
)
def test_what_else_ends_a_stream_passes_at_once(end: bytes) -> None:
    of = seam()
    assert b"".join(of.feed(chunked(ROLE, end))) == ROLE + end
    assert not of.mendable and b"".join(of.feed(whole(DONE))) == DONE and of.done


@pytest.mark.parametrize(
    "members",
    [
        {"n": 2},
        {"logprobs": True},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"guided_json": {}},
    ],
)
def test_never_asked_for(members: dict[str, Any]) -> None:
    assert continuation(CHAT, request(**members)) is None


def test_text_that_speaks_of_it() -> None:
    of = seam()
    said = event("one", {"content": '"recomputed"'})
    assert of.feed(chunked(said)) == [said] and not of.recomputed
