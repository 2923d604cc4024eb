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


def request(path: bytes = CHAT, **members: Any) -> bytes:
    prompt: dict[str, Any] = {"messages": [SYSTEM, USER]} if path == CHAT else {"prompt": "Once"}
    return json.dumps({"model": "m", **prompt, "stream": True, **members}).encode()


def seam(path: bytes = CHAT, **members: Any) -> RecomputedSeam:
    wanted = continuation(path, request(path, **members))
    assert wanted is not None
    return RecomputedSeam(wanted)


def chunked(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def event(name: str, delta: Any, finish: str | None = None, stop: object = None, used: int | None = None) -> bytes:
    choice = {"index": 0, ("delta" if isinstance(delta, dict) else "text"): delta, "finish_reason": finish, "stop_reason": stop}
    usage = {"usage": {"prompt_tokens": 9, "completion_tokens": used, "total_tokens": 9 + used}} if used is not None else {}
    return b"data: %b\n\n" % json.dumps({"id": name, "choices": [choice], **usage}).encode()


def marker(chat: bool = True) -> bytes:
    return event("one", {"content": ""} if chat else "", "stop", "recomputed")


def texts(passed: list[bytes]) -> list[dict[str, Any]]:
    joined = b"".join(passed)
    return [json.loads(each.removeprefix(b"data: ")) for each in joined.split(b"\n\n") if each and b"[DONE]" not in each]


ROLE = event("one", {"role": "assistant", "content": ""}, used=0)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("cut", [0, 1, 60, 200, 10_000])
def test_it_goes_on(cut: int) -> None:
    """Case 46, wherever the reads cut: 40 of 100 tokens are there, so 60 are asked for, behind the conversation as it was."""
    of = seam(max_completion_tokens=100)
    body = chunked(ROLE, event("one", {"content": "Once upon"}, used=40), marker(), DONE) + b"0\r\n\r\n"
    passed = of.feed(body[:cut]) + of.feed(body[cut:])
    assert of.recomputed and of.ended and not of.done
    assert b"recomputed" not in b"".join(passed) and b"[DONE]" not in b"".join(passed)
    asked = json.loads(of.resume() or b"")
    assert asked == json.loads(request()) | {
        "messages": [SYSTEM, USER, {"role": "assistant", "content": "Once upon"}],
        "continue_final_message": True, "add_generation_prompt": False, "max_completion_tokens": 60,
    }  # fmt: skip
    rest = [event("two", {"role": "assistant", "content": ""}, used=0), event("two", {"content": " a time"}, used=3)]
    end = event("two", {"content": ""}, "stop", used=3)
    passed += of.feed(chunked(*rest, end, DONE) + b"0\r\n\r\n")
    said = texts(passed)
    assert {each["id"] for each in said} == {"one"}
    assert [each["choices"][0]["delta"].get("role") for each in said].count("assistant") == 1
    assert "".join(each["choices"][0]["delta"]["content"] for each in said) == "Once upon a time"
    assert said[-1]["usage"]["completion_tokens"] == 43
    assert passed[-1] == DONE and of.done


def test_completions() -> None:
    of = seam(COMPLETIONS, max_tokens=50)
    of.feed(chunked(event("one", " upon", used=2), marker(False)))
    asked = json.loads(of.resume() or b"")
    assert (asked["prompt"], asked["max_tokens"]) == ("Once upon", 48)


def test_no_limit_stays_none() -> None:
    of = seam()
    of.feed(chunked(event("one", {"content": "Once"}), marker()))
    asked = json.loads(of.resume() or b"")
    assert not [key for key in asked if "tokens" in key]


def test_it_is_bounded() -> None:
    of = seam()
    for _ in range(RESUMED_MOST):
        of.feed(chunked(event("one", {"content": "x"}), marker()))
        assert of.resume() is not None
    of.feed(chunked(event("one", {"content": "x"}), marker()))
    assert of.recomputed and of.resume() is None
    assert of.give_up() == [marker()]


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}]
)
def test_relayed_where_there_is_more_than_text(delta: dict[str, Any]) -> None:
    """Case 44: the marker passes, as without the option."""
    of = seam()
    body = [ROLE, event("one", delta), marker(), DONE]
    passed = of.feed(chunked(*body) + b"0\r\n\r\n")
    assert passed == body and of.done and not of.recomputed and of.resume() is None


def test_relayed_where_the_count_is_not_known() -> None:
    of = seam(max_tokens=100)
    of.feed(chunked(event("one", {"content": "Once"}), marker()))
    assert of.recomputed and of.resume() is None
    assert of.give_up() == [marker()]


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
    told = event("one", {"content": '"recomputed"'})
    assert of.feed(chunked(told)) == [told] and not of.recomputed
