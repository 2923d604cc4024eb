"""A request as facts: flags and numbers as pydantic reads them, what the prompt is, and how many tokens it has about."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gateway.core.disagg import connector
from gateway.core.disagg.asked import MEDIUM, Asked, Prompt
from gateway.core.disagg.base import Bypass
from gateway.errors import Refusal
from tests.core.disagg.support import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, ask


@pytest.mark.parametrize(
    ("value", "stream"),
    [
        ("true", True),
        ("false", False),
        ("null", False),
        ("1", True),
        ("0", False),
        ("1.0", True),
        ('"true"', True),
        ('"False"', False),
        ('"1"', True),
        ('"0"', False),
        ('"on"', True),
        ('"off"', False),
        ('"Yes"', True),
        ('"n"', False),
    ],
)
def test_stream(value: str, stream: bool) -> None:
    assert Asked(CHAT, b'{"stream": %b}' % value.encode()).stream is stream


@pytest.mark.parametrize("value", ["2", "-1", '"ja"', '""', "[]", "{}", "0.5", "[true]", "NaN", "1e400"])
def test_no_flag(value: str) -> None:
    with pytest.raises(Refusal, match="stream is neither true nor false") as refused:
        Asked(CHAT, b'{"stream": %b}' % value.encode())
    assert refused.value.param == "stream"


def test_the_last_of_a_doubled_member_holds() -> None:
    assert Asked(CHAT, b'{"stream": true, "stream": false}').stream is False
    assert Asked(CHAT, b'{"stream": false, "str\\u0065am": true}').stream is True


@pytest.mark.parametrize(
    ("path", "members", "limit"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 7}, 7),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 1}, 1),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": None}, 1),
        (CHAT, {"max_tokens": "1"}, 1),
        (CHAT, {"max_tokens": 1.0}, 1),
        (COMPLETIONS, {"max_tokens": 1, "max_completion_tokens": 9}, 1),
        (RESPONSES, {"max_output_tokens": 1, "max_tokens": 9}, 1),
        (MESSAGES, {"max_tokens": 1}, 1),
        (GENERATE, {"sampling_params": {"max_tokens": 1}, "max_tokens": 9}, 1),
        (b"/generate", {"sampling_params": {"max_new_tokens": 3}}, 3),
    ],
)
def test_limits(path: bytes, members: dict[str, Any], limit: int | None) -> None:
    assert ask(path, **members).max_tokens == limit


@pytest.mark.parametrize("value", ["seven", [1], 1.5, {}])
def test_no_number(value: object) -> None:
    with pytest.raises(Refusal, match="max_tokens is no whole number"):
        ask(max_tokens=value)


@pytest.mark.parametrize(
    ("path", "members", "kind", "prompts"),
    [
        (CHAT, {}, Prompt.NONE, 0),
        (COMPLETIONS, {"prompt": "a, [b"}, Prompt.TEXT, 1),
        (COMPLETIONS, {"prompt": ["a"]}, Prompt.TEXTS, 1),
        (COMPLETIONS, {"prompt": ["a", "b,c", "d"]}, Prompt.TEXTS, 3),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, Prompt.TOKENS, 1),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, Prompt.TOKEN_LISTS, 2),
        (COMPLETIONS, {"prompt": []}, Prompt.TOKENS, 1),
        (GENERATE, {}, Prompt.TOKENS, 1),
        (b"/generate", {"prompt": None, "text": ["a", "b"]}, Prompt.TEXTS, 2),
        (RESPONSES, {"text": {"format": {}}}, Prompt.NONE, 0),
    ],
)
def test_prompts(path: bytes, members: dict[str, Any], kind: Prompt, prompts: int) -> None:
    asked = ask(path, **members)
    assert (asked.prompt_kind, asked.prompts) == (kind, prompts)


def test_tokens_of_text() -> None:
    assert ask(COMPLETIONS, prompt="x" * 4000).tokens == 1000
    assert 1000 <= ask(messages=[{"role": "user", "content": "x" * 4000}]).tokens <= 1020
    assert ask(COMPLETIONS, prompt=list(range(1000))).tokens == 1000
    assert ask(COMPLETIONS, prompt=[[1, 2], [3, 4]]).tokens == 4
    assert ask(GENERATE, token_ids=list(range(500))).tokens == 500


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"x" * 300_000).decode()}},
        {"type": "image_url", "image_url": {"url": "https://example.org/" + "a" * 5000}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"x" * 300_000).decode(), "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "data": base64.b64encode(b"x" * 300_000).decode()}},
        {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 400_000},
    ],
)
def test_tokens_of_media(part: dict[str, Any]) -> None:
    """An image counts as one image, however many octets it has; text that speaks of one counts as text."""
    asked = ask(messages=[{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])
    assert MEDIUM <= asked.tokens <= MEDIUM + 60
    text = json.dumps(part)
    quoted = ask(messages=[{"role": "user", "content": text}]).tokens
    assert quoted >= len(text) // 4


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("required", True),
        ("auto", False),
        ("none", False),
        (None, False),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "f"}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "allowed_tools", "mode": "required"}, True),
        ({"type": "allowed_tools", "mode": "auto"}, False),
        ({}, True),
    ],
)
def test_forced_tools(choice: object, forced: bool) -> None:
    assert ask(tool_choice=choice).tool_forced is forced


@pytest.mark.parametrize(
    ("path", "members", "found"),
    [
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": None}, None),
        (CHAT, {"echo": True, "logprobs": True}, None),
        (CHAT, {"echo": True, "logprobs": True, "top_logprobs": 2}, "echo"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"echo": True}, None),
        (COMPLETIONS, {"logprobs": 1}, None),
        (GENERATE, {"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        (GENERATE, {"prompt_logprobs": 1}, None),
    ],
)
def test_prompt_logprobs(path: bytes, members: dict[str, Any], found: str | None) -> None:
    assert ask(path, **members).prompt_logprobs == found


@pytest.mark.parametrize("value", [b"[]", b"7", b'"x"'])
def test_sampling_params_that_are_no_object(value: bytes) -> None:
    """Told as such, before anything is asked; elsewhere the member is nobody's, or may be a list (SGLang)."""
    body = b'{"token_ids": [1], "sampling_params": %b}' % value
    with pytest.raises(Refusal, match="sampling_params is no JSON object") as refused:
        Asked(b"/inference/v1/generate", body)
    assert refused.value.param == "sampling_params"
    assert Asked(b"/generate", body).sampling is None
    assert Asked(b"/inference/v1/generate", b'{"token_ids": [1], "sampling_params": null}').sampling is None


@pytest.mark.parametrize("limit", [b"1", b"0", b"-3"])
def test_who_wants_one_token_or_fewer_needs_no_prefill(limit: bytes) -> None:
    """Fewer is decode's to refuse: prefill would have computed, and kept, for nothing."""
    asked = Asked(b"/v1/completions", b'{"prompt": "x", "max_tokens": %b}' % limit)
    assert connector("nixl").judge(asked) is Bypass.ONE_TOKEN
