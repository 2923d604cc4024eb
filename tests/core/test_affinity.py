"""What requests are kept together by: turns of one conversation have the same key, and two conversations do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.affinity import PREFIX, Keys
from gateway.core.head import Field

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/messages",
    b"/v1/responses",
)
ALL = Keys(["header", "user", "prefix"], "X-Session-ID")
SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 200}


def fields(**values: str) -> list[Field]:
    pairs = [("accept", "*/*"), *((name.replace("_", "-"), value) for name, value in values.items())]
    return [(n.encode(), f"{n}: {v}".encode(), v.encode(), 0) for n, v in pairs]


def key(path: bytes, body: Any, keys: Keys = ALL, **header: str) -> float | None:
    return keys.find(fields(**header), path, body if isinstance(body, bytes) else json.dumps(body).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class TestConversations:
    """The prompt's beginning, in each dialect."""

    @pytest.mark.parametrize(
        ("path", "member", "system"),
        [(CHAT, "messages", [SYSTEM]), (MESSAGES, "messages", []), (RESPONSES, "input", []), (CHAT, "messages", [])],
    )
    def test_turns(self, path: bytes, member: str, system: list[Any]) -> None:
        said = [*system, user("What is a gateway?")]
        first = key(path, {"model": "m", member: said})
        said += [assistant("It stands between."), user("Between what?")]
        second = key(path, {"model": "m", "temperature": 0.5, member: said, "stream": True})
        other = key(path, {"model": "m", member: [*system, user("What is a backend?")]})
        assert first is not None
        assert 0 <= first < 1
        assert first == second != other

    def test_what_stands_before_the_users_words_counts(self) -> None:
        bodies = [
            (CHAT, {"messages": [{"role": "system", "content": who}, user("Hello")]}) for who in ("a pirate", "a poet")
        ]
        bodies += [(MESSAGES, {"system": who, "messages": [user("Hello")]}) for who in ("a pirate", "a poet")]
        bodies += [(RESPONSES, {"instructions": who, "input": "Hello"}) for who in ("a pirate", "a poet")]
        found = [key(path, body) for path, body in bodies]
        assert None not in found
        assert len(set(found)) == 6 - 2  # two dialects word it alike, and ask the same engine for the same
        assert found[0] != found[1]

    @pytest.mark.parametrize(
        ("path", "make"),
        [
            (CHAT, lambda text: {"messages": [SYSTEM, user(text)]}),
            (COMPLETIONS, lambda text: {"prompt": text}),
            (COMPLETIONS, lambda text: {"prompt": [text]}),
            (RESPONSES, lambda text: {"input": text}),
            (MESSAGES, lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        ],
    )
    def test_questions_about_one_long_document(self, path: bytes, make: Any) -> None:
        """What begins alike is kept together, though it ends otherwise; what begins otherwise is not."""
        document = "It was a dark and stormy night. " * PREFIX
        first, second = key(path, make(document + "Who did it?")), key(path, make(document + "And why?"))
        assert first == second is not None
        assert first != key(path, make("Once. " + document))

    def test_token_ids(self) -> None:
        assert key(COMPLETIONS, {"prompt": [1, 2, 3]}) == key(COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}) is not None
        assert key(COMPLETIONS, {"prompt": [1, 2, 3]}) != key(COMPLETIONS, {"prompt": [1, 2, 4]})

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (b"/v1/embeddings", {"input": "some text"}),
            (b"/tokenize", {"prompt": "some text"}),
            (CHAT, {"prompt": "some text"}),
            (CHAT, {"messages": []}),
            (CHAT, {"messages": None}),
            (CHAT, {"messages": "hello"}),
            (CHAT, {"messages": [3]}),
            (COMPLETIONS, {}),
            (RESPONSES, {"input": None}),
            (MESSAGES, {"system": "x"}),
            (CHAT, b""),
            (CHAT, b"{"),
            (CHAT, b"\x1f\x8b\x08\x00"),
            (CHAT, b"[" * 100_000),
            (CHAT, b'{"messages": [{"role": "user", "content": NaN}]}'),
        ],
    )
    def test_what_has_none(self, path: bytes, body: Any) -> None:
        assert key(path, body) is None

    @pytest.mark.parametrize(
        "message",
        [
            {"role": 7, "content": "x"},
            {"content": "x"},
            {"role": "user"},
            {"role": "user", "content": None},
            {"role": "tool", "content": {"a": [1, {"b": "c"}]}},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        ],
    )
    def test_odd_messages(self, message: Any) -> None:
        """Whatever they are, they are the engine's to judge."""
        body = {"messages": [SYSTEM, message, user("Hello")]}
        assert key(CHAT, body) == key(CHAT, body) is not None


BODY = {"user": "u1", "messages": [user("Hello")]}


class TestSources:
    """The first of them that a request has, in the operator's order."""

    def test_the_order(self) -> None:
        session, name = key(CHAT, b"", x_session_id="s1"), key(CHAT, {"user": "u1"})
        words = key(CHAT, {"messages": [user("Hello")]})
        assert len({session, name, words, None}) == 4
        assert key(CHAT, BODY, x_session_id="s1") == session
        assert key(CHAT, BODY) == name
        assert key(CHAT, BODY, Keys(["prefix", "user"], "x")) == words
        assert key(CHAT, BODY, Keys(["prefix"], "x"), x_session_id="s1") == words
        assert key(CHAT, BODY, Keys(["header"], "x-other"), x_session_id="s1") is None

    def test_an_empty_session_is_none(self) -> None:
        assert key(CHAT, BODY, x_session_id="") == key(CHAT, BODY)

    def test_a_session_holds_whatever_is_asked(self) -> None:
        """On every path, and without a body that could be looked into."""
        assert key(b"/v1/audio/transcriptions", b"", x_session_id="s") == key(CHAT, BODY, x_session_id="s")

    def test_users(self) -> None:
        """By the name that each dialect has for them; numbers, null and nothing are no names."""
        anonymous = {"messages": [user("Hello")]}
        none = key(CHAT, anonymous)
        for odd in (None, "", 7, {"id": "u"}, ["u"]):
            assert key(CHAT, {**anonymous, "user": odd}) == none
        assert key(CHAT, {**anonymous, "user": "u", "prompt_cache_key": "k"}) == key(RESPONSES, {"prompt_cache_key": "k"})
        assert key(b"/v1/embeddings", {"user": "u", "input": "x"}) == key(CHAT, {**anonymous, "user": "u"})
        named = {**anonymous, "metadata": {"user_id": "u"}}
        assert key(MESSAGES, named) == key(CHAT, {"user": "u"})
        assert key(CHAT, named) == none  # there it is the client's own note
        for odd in (None, {}, {"user_id": None}, [], "x"):
            assert key(MESSAGES, {**anonymous, "metadata": odd}) == key(MESSAGES, anonymous)

    def test_lone_surrogates_in_a_name(self) -> None:
        assert key(CHAT, b'{"user": "\\ud800", "messages": []}') is None

    @pytest.mark.parametrize(
        ("by", "session", "asks"),
        [
            (["header"], "", False),
            (["header"], "s", False),
            (["header", "user"], "s", False),
            (["header", "user"], "", True),
            (["user", "header"], "s", True),
            (["prefix"], "s", True),
        ],
    )
    def test_whether_the_body_is_asked_for(self, by: list[str], session: str, asks: bool) -> None:
        """Where the head says enough, a body is not held for this."""
        keys = Keys(by, "x-session-id")
        assert keys.asks_for_body(fields(x_session_id=session) if session else fields()) is asks


def test_the_same_in_every_process() -> None:
    """As of the first version: gateways beside each other, and one that was started again, agree."""
    assert key(CHAT, b"", x_session_id="session-1") == 0.6808126673171412
