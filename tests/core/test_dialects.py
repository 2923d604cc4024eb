"""What the dialects read in events, whole answers and requests, and how they word errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.dialects import Dialect, Reading, chat, completions, messages, responses
from gateway.core.sse import Event, Scanner

ALL = [chat, completions, responses, messages]


def read(dialect: Dialect, said: Any, type: bytes = b"") -> Reading:
    return dialect.read(Event(said if isinstance(said, bytes) else json.dumps(said).encode(), type))


def delta(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def test_paths() -> None:
    assert [dialects.for_path(f"/v1/{name}") for name in ("chat/completions", "completions", "responses", "messages")] == ALL
    for path in ("/v1/embeddings", "/v1/messages/count_tokens", "/v1/chat/completions/", "", "/v1/models"):
        assert dialects.for_path(path) is None
    assert dialects.DEFAULT is chat
    assert [dialect.name for dialect in ALL] == ["chat", "completions", "responses", "messages"]


CALL = [{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]


@pytest.mark.parametrize(
    ("said", "output", "visible"),
    [
        (delta(content="a"), True, True),
        (delta(content="a", role="assistant"), True, True),
        (delta(content=""), True, False),  # a token without text
        (delta(content="", role="assistant"), False, False),
        (delta(content="", role=None), False, False),  # the key is there
        (delta(content=None), False, False),
        (delta(), False, False),
        (delta(role="assistant"), False, False),
        (delta(finish="stop"), False, False),
        (delta(finish="stop", content=""), True, False),
        (delta(finish="length", content="a"), True, True),
        (delta(reasoning="a"), True, False),
        (delta(reasoning_content="a"), True, False),
        (delta(reasoning="", role="assistant", content=""), False, False),
        (delta(reasoning="a", content="b"), True, True),
        (delta(tool_calls=CALL), True, True),
        (delta(tool_calls=[]), False, False),
        (delta(function_call={"arguments": "a"}), True, True),
        (delta(refusal="no"), True, True),
        (delta(audio={"data": "aa"}), True, True),
        ({"choices": []}, False, False),
        ({"choices": [], "prompt_filter_results": [1]}, False, False),
        ({"choices": None}, False, False),
        ({"choices": [{"index": 0, "delta": None}]}, False, False),
        ({"error": {"message": "x"}}, False, False),
        ({}, False, False),
        ([], False, False),
        (b"", False, False),
        (b"[DONE]", False, False),
        (b'{"choices":[{"delta":{"content":"a"', False, False),
        (b'{"choices":[{"delta":{"content":"\xff"}}]}', False, False),
    ],
)
def test_chat_output(said: Any, output: bool, visible: bool) -> None:
    reading = read(chat, said)
    assert (reading.output, reading.visible) == (output, visible)


def test_chat_says() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    reading = read(chat, {**delta(content="a"), "usage": usage})
    assert (reading.tokens, reading.output_tokens, reading.prompt_tokens, reading.cached_tokens) == (5, None, 7, 3)
    assert not reading.usage_only
    reading = read(chat, {"choices": [], "usage": usage})
    assert (reading.tokens, reading.output_tokens, reading.prompt_tokens, reading.cached_tokens) == (None, 5, 7, 3)
    assert reading.usage_only
    assert not read(chat, {"choices": [], "usage": None}).usage_only
    assert not read(chat, {"usage": usage}).usage_only
    reading = read(chat, {"choices": [{"index": 3, "delta": {"content": "a"}, "token_ids": [1, 2]}], "usage": None})
    assert (reading.choices, reading.token_ids, reading.tokens) == ((3,), 2, None)
    two = [{"index": 0, "finish_reason": "abort"}, {"index": 1, "delta": {"content": "a"}, "finish_reason": "stop"}]
    reading = read(chat, {"choices": two})
    assert (reading.choices, reading.finish_reason, reading.output) == ((0, 1), "abort", True)
    assert read(chat, b"[DONE]").terminal and read(chat, b"[DONE] ").terminal
    assert not read(chat, b"[DONE]x").terminal


@pytest.mark.parametrize(
    "usage", ["x", 5, [], {"completion_tokens": "5"}, {"completion_tokens": -1}, {"completion_tokens": 1 << 60}]
)
def test_an_odd_usage_hides_no_output(usage: Any) -> None:
    reading = read(chat, {**delta(content="a"), "usage": usage})
    assert reading.output and reading.tokens is None
    assert read(completions, {"choices": [{"text": "a"}], "usage": usage}).output
    assert read(messages, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}).finish_reason
    assert read(responses, {"type": "response.completed", "response": {"usage": usage}}).terminal


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"error": {"message": "m", "type": "T", "code": 500}}, "T"),
        ({"error": {"message": "m", "type": None, "code": 500}}, "500"),
        ({"error": {"message": "m", "type": "", "code": {}}}, "error"),
        ({"error": {"type": "x" * 1000}}, "x" * 64),
        ({"error": {"code": 10**30}}, "error"),
        ({"error": "boom"}, "error"),
    ],
)
@pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: str(dialect.name))
def test_errors(dialect: Dialect, said: Any, name: str) -> None:
    assert read(dialect, said).error == name
    assert read(dialect, {"type": "error", **said}).error == name
    assert read(dialect, b"boom", b"error").error == "error"
    assert read(dialect, b"boom").error is None
    assert read(chat, {"object": "error", "message": "m", "code": 400}).error == "error"


def test_completions() -> None:
    reading = read(completions, {"choices": [{"index": 0, "text": "", "finish_reason": None}]})
    assert (reading.output, reading.visible, reading.key) == (True, False, b"")
    reading = read(completions, {"choices": [{"index": 0, "text": "a"}]})
    assert (reading.output, reading.visible, reading.key, reading.least) == (True, True, b"text", 0)
    assert not read(completions, {"choices": []}).output


@pytest.mark.parametrize(
    ("said", "output", "visible"),
    [
        ({"type": "response.output_text.delta", "delta": "a"}, True, True),
        ({"type": "response.output_text.delta", "delta": ""}, False, False),
        ({"type": "response.reasoning_text.delta", "delta": "a"}, True, False),
        ({"type": "response.reasoning_summary_text.delta", "delta": "a"}, True, False),
        ({"type": "response.function_call_arguments.delta", "delta": "a"}, True, True),
        ({"type": "response.output_text.done", "text": "a"}, False, False),
        ({"type": "response.created", "response": {"status": "in_progress"}}, False, False),
        ({"type": "response.output_item.added", "item": {}}, False, False),
    ],
)
def test_responses_output(said: Any, output: bool, visible: bool) -> None:
    reading = read(responses, said)
    assert (reading.output, reading.visible, reading.terminal, reading.key) == (output, visible, False, b"")


def test_responses_ends() -> None:
    usage = {"input_tokens": 6, "output_tokens": 16, "input_tokens_details": {"cached_tokens": 2}}
    answer = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": usage}
    for kind in ("response.completed", "response.incomplete"):
        reading = read(responses, {"type": kind, "response": answer})
        assert (reading.terminal, reading.finish_reason, reading.error) == (True, "max_output_tokens", None)
        assert (reading.prompt_tokens, reading.output_tokens, reading.cached_tokens) == (6, 16, 2)
        assert read(responses, {"response": answer}, kind.encode()).terminal  # the type is in the event's own field
        assert read(responses, {"type": kind}).finish_reason == "completed"
    reading = read(responses, {"type": "response.failed", "response": {"status": "failed", "error": {"code": "x"}}})
    assert (reading.terminal, reading.error) == (False, "x")
    assert read(responses, {"type": "response.failed"}).error == "error"
    assert read(responses, {"type": "response.completed", "response": {"status": "failed"}}).error == "failed"
    assert read(responses, {"type": "error", "code": "c", "message": "m"}).error == "c"


@pytest.mark.parametrize(
    ("part", "output", "visible", "key"),
    [
        ({"type": "text_delta", "text": "a"}, True, True, b"text"),
        ({"type": "text_delta", "text": ""}, False, False, b""),
        ({"type": "thinking_delta", "thinking": "a"}, True, False, b"thinking"),
        ({"type": "input_json_delta", "partial_json": "{"}, True, True, b"partial_json"),
        ({"type": "input_json_delta", "partial_json": ""}, False, False, b""),
        ({"type": "signature_delta", "signature": "a"}, False, False, b""),
    ],
)
def test_messages_output(part: Any, output: bool, visible: bool, key: bytes) -> None:
    reading = read(messages, {"type": "content_block_delta", "index": 0, "delta": part})
    assert (reading.output, reading.visible, reading.key, reading.least) == (output, visible, key, 1)


def test_messages_says() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 404, "output_tokens": 1}}}
    reading = read(messages, start)
    assert (reading.prompt_tokens, reading.output_tokens, reading.tokens) == (404, None, None)
    usage = {"input_tokens": 20, "cache_read_input_tokens": 380, "cache_creation_input_tokens": 4, "output_tokens": 9}
    reading = read(messages, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage})
    assert (reading.prompt_tokens, reading.output_tokens, reading.cached_tokens) == (404, 9, 380)
    assert (reading.finish_reason, reading.terminal) == ("end_turn", False)
    assert read(messages, {"type": "message_stop"}).terminal
    for kind in ("ping", "content_block_start", "content_block_stop"):
        assert read(messages, {"type": kind, "index": 0}) == Reading()


def test_whole_answers() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": None}
    whole = chat.read_whole(json.dumps({"choices": [{"index": 0, "finish_reason": "stop"}], "usage": usage}).encode())
    assert (whole.finish_reason, whole.prompt_tokens, whole.output_tokens, whole.error) == ("stop", 7, 5, None)
    whole = completions.read_whole(b'{"choices":[{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"abort"}]}')
    assert (whole.finish_reason, whole.choices) == ("abort", (0, 1))
    whole = responses.read_whole(b'{"status":"completed","error":null,"usage":{"input_tokens":1,"output_tokens":2}}')
    assert (whole.finish_reason, whole.prompt_tokens, whole.output_tokens, whole.error) == ("completed", 1, 2, None)
    whole = messages.read_whole(b'{"type":"message","stop_reason":"end_turn","usage":{"input_tokens":1,"output_tokens":2}}')
    assert (whole.finish_reason, whole.prompt_tokens, whole.output_tokens, whole.error) == ("end_turn", 1, 2, None)
    assert messages.read_whole(b'{"type":"message","stop_reason":null}').finish_reason == "abort"
    for dialect in ALL:
        assert dialect.read_whole(b'{"error":{"type":"T"}}').error == "T"
        assert dialect.read_whole(b"") == dialect.read_whole(b"<html>") == Reading()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "choices", "delta", "index", "text", "usage", "error", "response", "message", "finish_reason"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON | st.binary(max_size=40))
@settings(deadline=None, max_examples=500)
def test_nothing_raises(said: Any) -> None:
    octets = said if isinstance(said, bytes) else json.dumps(said).encode()
    for dialect in ALL:
        for kind in (b"", b"error", b"response.completed", b"message_delta"):
            read(dialect, octets, kind)
        dialect.read_whole(octets)
    deep = b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert read(chat, deep) == Reading()


def test_error_texts() -> None:
    (event,) = Scanner().feed(chat.error_event("timeout_idle", 'a "b"\n\u2028c'))
    error = {"message": 'a "b"\n\u2028c', "type": "api_error", "param": None, "code": "timeout_idle"}
    assert (event.type, json.loads(event.data)) == (b"", {"error": error})
    assert json.loads(completions.error_body("unknown_model", "m", param="model"))["error"] == {
        "message": "m",
        "type": "not_found_error",
        "param": "model",
        "code": "unknown_model",
    }
    assert json.loads(chat.error_body("queue_full", "m", "t"))["error"]["type"] == "t"
    (event,) = Scanner().feed(messages.error_event("upstream_reset", "m"))
    assert event.type == b"error"
    assert json.loads(event.data) == {"type": "error", "error": {"type": "api_error", "message": "m"}}
    assert json.loads(messages.error_body("queue_full", "m"))["error"]["type"] == "overloaded_error"
    (event,) = Scanner().feed(responses.error_event("upstream_reset", "m"))
    assert event.type == b"error"
    assert json.loads(event.data) == {"type": "error", "code": "upstream_reset", "message": "m", "param": None}
    assert "error" in json.loads(responses.error_body("queue_full", "m"))
    for dialect in ALL:  # what the dialect says of an error, it also reads as one
        (event,) = Scanner().feed(dialect.error_event("upstream_reset", "lone \ud800"))
        assert dialect.read(event).error in ("api_error", "upstream_reset")
