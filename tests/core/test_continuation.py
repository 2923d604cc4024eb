"""The request for the rest of an answer: the client's own bytes, but for what must be said differently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.continuation import CHAT, COMPLETIONS, Continuation, continuation

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "Say", "stream": True, "max_tokens": 64}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
SAID = TEXT.filter(lambda text: not text[-1].isspace())
CONTENT = st.one_of(
    TEXT, st.just([{"type": "text", "text": 'a "] }, {'}, {"type": "image_url", "image_url": {"url": "data:,x"}}]), st.none()
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": CONTENT})
MORE = st.dictionaries(
    st.sampled_from(["temperature", "seed", "user", "stop_token_ids", "chat_template_kwargs", "metadata"]),
    st.one_of(st.none(), st.integers(), TEXT, st.lists(st.integers(0, 9), max_size=3)),
)
LIMITS = st.dictionaries(st.sampled_from(["max_tokens", "max_completion_tokens", "min_tokens"]), st.integers(10, 1 << 60))


def written(body: dict[str, Any], blanks: bool, ascii_only: bool) -> bytes:
    return json.dumps(body, indent=2 if blanks else None, ensure_ascii=ascii_only).encode()


def made(path: bytes, body: bytes) -> Continuation:
    found = continuation(path, body)
    assert found is not None
    return found


def shrunk(limits: dict[str, int], tokens: int) -> dict[str, int]:
    return {key: value - tokens for key, value in limits.items()}


@given(st.lists(MESSAGE, min_size=1, max_size=3), MORE, LIMITS, SAID, st.integers(1, 9), st.booleans(), st.booleans())
def test_chat(
    messages: list[Any], more: Any, limits: dict[str, int], text: str, tokens: int, blanks: bool, ascii_only: bool
) -> None:
    asked = {**more, **limits, **ASKED, "messages": messages}
    body = made(CHAT, written(asked, blanks, ascii_only)).after(text, tokens)
    assert body is not None
    assert json.loads(body) == {
        **asked, **shrunk(limits, tokens), "messages": [*messages, {"role": "assistant", "content": text}],
        "continue_final_message": True, "add_generation_prompt": False,
    }  # fmt: skip


@given(st.lists(MESSAGE, max_size=2), TEXT, SAID, st.booleans(), st.booleans())
def test_chat_that_is_a_continuation_itself(
    messages: list[Any], begun: str, text: str, blanks: bool, ascii_only: bool
) -> None:
    own = {"content": begun, "role": "assistant", "name": 'x"}]'}
    asked = {**ASKED, "messages": [*messages, own], "continue_final_message": True, "add_generation_prompt": False}
    body = made(CHAT, written(asked, blanks, ascii_only)).after(text, None)
    assert body is not None
    assert json.loads(body) == {**asked, "messages": [*messages, {**own, "content": begun + text}]}


@given(TEXT, MORE, LIMITS, TEXT, st.integers(1, 9), st.booleans(), st.booleans())
def test_completions(
    prompt: str, more: Any, limits: dict[str, int], text: str, tokens: int, blanks: bool, ascii_only: bool
) -> None:
    asked = {**more, "prompt": prompt, **limits, "stream": True}
    body = made(COMPLETIONS, written(asked, blanks, ascii_only)).after(text, tokens)
    assert body is not None
    wanted = {**asked, "prompt": prompt + text, **shrunk(limits, tokens)}
    assert json.loads(body) == ({"max_tokens": 16 - tokens, **wanted} if "max_tokens" not in limits else wanted)


@pytest.mark.parametrize("blank", ["", " "])
def test_a_prompt_of_tokens(blank: str) -> None:
    """It grows by those that were generated, where these are known."""
    of = made(COMPLETIONS, f'{{"prompt": [1, 2{blank}], "stream": true, "max_tokens": 9}}'.encode())
    assert of.after("x", 2) is None
    assert json.loads(of.after("x", 2, ids=b"3,4") or b"") == {"prompt": [1, 2, 3, 4], "stream": True, "max_tokens": 7}


def test_a_prompt_of_words_whose_tokens_are_known() -> None:
    of = made(COMPLETIONS, b'{"prompt": "ab", "stream": true, "max_tokens": 9}')
    assert json.loads(of.after("x", 2, b"1, 2", b"3,4") or b"") == {"prompt": [1, 2, 3, 4], "stream": True, "max_tokens": 7}
    assert json.loads(of.after("x", 2, b"", b"3,4") or b"")["prompt"] == "abx"


def test_nothing_else_is_touched() -> None:
    """Numbers as they were written, doubled members, blanks: all but the seam is the client's."""
    body = b' {"seed":1.0, "temperature" :1e0,"user":"\\u00e9", "max_tokens":9,"stream":true,"messages": [ {"role":"user","content":"\\ud83d\\ude42"} ] } '  # noqa: E501
    assert made(CHAT, body).after("x", 2) == (
        b' {"seed":1.0, "temperature" :1e0,"user":"\\u00e9", "max_tokens":7,"stream":true,"add_generation_prompt": false, '
        b'"continue_final_message": true, "messages": [ {"role":"user","content":"\\ud83d\\ude42"} '
        b', {"role": "assistant", "content": "x"}] } '
    )


def test_before_anything_was_said_it_is_the_same_question() -> None:
    body = json.dumps({**ASKED, "max_tokens": 5}).encode()
    assert made(CHAT, body).after("", None) == body


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{}]}, {"tool_choice": "auto"}, {"functions": [{}]}, {"response_format": {"type": "json_schema"}},
        {"guided_json": {}}, {"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}, {"logprobs": True},
        {"top_logprobs": 3}, {"prompt_logprobs": 1}, {"n": 2}, {"best_of": 2}, {"echo": True}, {"stop": "x"}, {"stop": ["x"]},
        {"bad_words": ["x"]}, {"presence_penalty": 1}, {"frequency_penalty": -1}, {"use_beam_search": True},
        {"truncate_prompt_tokens": 3}, {"logits_processors": ["x"]}, {"skip_special_tokens": False}, {"vllm_xargs": {}},
        {"stream": False}, {"stream": None}, {"add_generation_prompt": False}, {"max_tokens": "64"}, {"max_tokens": 6.5},
        {"continue_final_message": True}, {"messages": []}, {"messages": "hi"}, {"messages": None}, {"made_up": 0},
        {"modalities": ["text", "audio"]}, {"kv_transfer_params": {}},
    ],
)  # fmt: skip
def test_never(more: dict[str, Any]) -> None:
    assert continuation(CHAT, json.dumps({**ASKED, **more}).encode()) is None


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []}, {"tools": None}, {"tool_choice": None}, {"n": 1}, {"logprobs": False}, {"stop": []}, {"stop": None},
        {"presence_penalty": 0.0}, {"response_format": {"type": "text"}}, {"made_up": None}, {"modalities": ["text"]},
        {"max_tokens": None}, {"add_generation_prompt": True}, {"skip_special_tokens": True}, {"top_logprobs": 0},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_special(more: dict[str, Any]) -> None:
    assert made(CHAT, json.dumps({**ASKED, **more}).encode()).after("x", None) is not None


@pytest.mark.parametrize("prompt", [["a"], [], [1, "a"], [1, True], [[1]], None, 3])
def test_only_one_prompt(prompt: Any) -> None:
    assert continuation(COMPLETIONS, json.dumps({**PROMPT, "prompt": prompt}).encode()) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"stream": true}', b'"x"', b"\xff", b"[" * 5000])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, b"/v1/responses"])
def test_no_request(path: bytes, body: bytes) -> None:
    assert continuation(path, body) is None


def test_limits_need_a_count() -> None:
    limited = made(CHAT, json.dumps({**ASKED, "max_tokens": 5}).encode())
    assert limited.after("x", None) is None
    assert limited.after("x", 5) is None  # nothing is left
    assert limited.after("x", 4) is not None
    told = made(CHAT, json.dumps({**ASKED, "stream_options": {"include_usage": True}}).encode())
    assert (told.usage, told.after("x", None)) == (True, None)
    unsaid = made(COMPLETIONS, json.dumps({"prompt": "a", "stream": True}).encode())
    assert unsaid.after("x", None) is None
    assert unsaid.after("x", 16) is None
    free = made(COMPLETIONS, json.dumps({"prompt": "a", "stream": True, "max_tokens": None}).encode())
    assert free.after("x", None) is not None


def test_a_blank_at_the_end_of_a_message_would_be_trimmed() -> None:
    assert made(CHAT, json.dumps(ASKED).encode()).after("x\n", None) is None
    assert made(COMPLETIONS, json.dumps(PROMPT).encode()).after("x\n", 1) is not None
