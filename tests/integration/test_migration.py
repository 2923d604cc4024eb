"""models.NAME.migrate: a stream whose backend dies goes on on another one, cut between two events, or ends as it would have."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.test_fleet import SLOW, fleet, served, states, urls
from tests.support import script as s
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]
WORDS = ["The", " capital", " of", " Fränce", " is", " \"Paris\"", "\n-", "🙂", "."]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}
COUNTED = {**CHAT, "max_tokens": 64, "min_tokens": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PROMPT = {"model": "m", "prompt": "Say: ", "stream": True, "max_tokens": 64}
PROMPT_TOKENS = 7


def configured(**more: Any) -> dict[str, Any]:
    return {"models": {"m": {"migrate": {"attempts": 2}}}, "health": SLOW, "balance": "round_robin", **more}


def usage(tokens: int, prompt: int = PROMPT_TOKENS) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


def events(
    words: list[str], *, number: int = 1, counted: bool = False, chat: bool = True, prompt: int = PROMPT_TOKENS,
    ids: bool = False,
) -> list[bytes]:  # fmt: skip
    """What an engine streams for `words`: a token each; the last one ends it."""
    made = []
    common = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1000 + number, "model": "m"}

    def one(choice: dict[str, Any], tokens: int) -> bytes:
        return s.event({**common, "choices": [{"index": 0, **choice}], **({"usage": usage(tokens, prompt)} if counted else {})})

    if chat:
        made.append(one({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, 0))
    for at, word in enumerate(words, 1):
        said: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
        if ids:
            said["token_ids"] = [at]
        made.append(one({**said, "finish_reason": "stop" if at == len(words) else None}, at))
    if counted:
        made.append(s.event({**common, "choices": [], "usage": usage(len(words), prompt)}))
    return [*made, s.DONE]


def framed(found: list[bytes]) -> bytes:
    return b"".join(map(s.chunk, found))


def text_of(body: bytes) -> str:
    said = [json.loads(line[6:]) for line in body.split(b"\n\n") if line and line != b"data: [DONE]"]
    choices = [choice for chunk in said for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    assert body.endswith(s.DONE)
    assert body.count(s.DONE) == 1
    return [json.loads(line[6:]) for line in body.removesuffix(s.DONE).split(b"\n\n") if line]


class Engine:
    """Goes on with whatever text it is given, to the end of WORDS; it counts, and reads prompts, as it is told."""

    def __init__(self, **manner: Any) -> None:
        self.manner = manner
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        asked = json.loads(request.body)
        self.asked.append(asked)
        if "prompt" in asked:
            done = asked["prompt"].removeprefix(PROMPT["prompt"])
        else:
            last = asked["messages"][-1]
            done = last["content"] if last["role"] == "assistant" else ""
            assert bool(done) == asked.get("continue_final_message", False) == (not asked.get("add_generation_prompt", True))
        whole = "".join(WORDS)
        assert whole.startswith(done)
        left, size = list(WORDS), 0
        while size < len(done):
            size += len(left.pop(0))
        await wire.send(s.SSE_HEAD + framed(events(left, number=2, **self.manner)) + s.LAST)


async def start(start_gateway: Start, backends: list[RawUpstream], **more: Any) -> Gateway:
    return await start_gateway(config=configured(**more), backends=urls(backends))


async def at_rest(gateway: Gateway) -> None:
    await gateway.idle()
    assert {b["in_flight"] for b in await states(gateway)} == {0}
    assert (await gateway.metrics()).value("tokenpipe_requests_in_flight") == 0


async def ask(gateway: Gateway, body: dict[str, Any], path: str = "/v1/chat/completions") -> Message:
    return await gateway.ask(s.post(body, path=path))


async def test_at_every_offset(start_gateway: Start) -> None:
    """Whatever the dead backend's last octet was, the client sees whole events, one text, one id and one end."""
    async with fleet(2) as backends:
        whole = framed(events(WORDS))
        backends[1].script = Engine()
        gateway = await start(start_gateway, backends, breaker={"failures": 10_000})
        last = len(framed(events(WORDS)[-2:]))  # with the last token comes the reason why it ends: nothing is left to be said
        offsets = list(range(0, len(whole) - last, 5)) + [len(whole) - last]
        for offset in offsets:
            backends[0].script = s.raw(s.SSE_HEAD + whole[:offset], then="reset" if offset % 2 else "fin")
            answer = await ask(gateway, CHAT)
            assert answer.complete, offset
            assert text_of(answer.body) == "".join(WORDS), offset
            chunks = chunks_of(answer.body)
            assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
            assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
        assert served(backends) == [len(offsets)] * 2
        await at_rest(gateway)
        assert await gateway.metric("tokenpipe_migrations_total", reason="upstream_reset") == len(offsets)


ABORTED = s.event({"id": "x", "choices": [{"index": 0, "delta": {"content": "lost"}, "finish_reason": "abort"}]})
BROKEN = s.event({"error": {"message": "boom", "type": "E", "param": None, "code": 500}})
DEATHS = [
    ("reset", s.raw, b"", "reset", "upstream_reset"),
    ("end", s.raw, b"", "fin", "upstream_reset"),
    ("no chunks", s.raw, b"what is this\r\n", "keep", "upstream_reset"),
    ("abort", s.raw, framed([ABORTED, s.DONE]) + s.LAST, "keep", "stream_error"),
    ("error", s.raw, framed([BROKEN, s.DONE]) + s.LAST, "keep", "stream_error"),
    ("no reason", s.raw, framed([s.DONE]) + s.LAST, "keep", "stream_error"),
    ("no terminal", s.raw, s.LAST, "keep", "upstream_truncated"),
]


@pytest.mark.parametrize("death", DEATHS, ids=[death[0] for death in DEATHS])
@pytest.mark.parametrize("words", [0, 1, 3])
async def test_every_way_to_die(start_gateway: Start, death: Any, words: int) -> None:
    _, script, last, then, reason = death
    async with fleet(2) as backends:
        begun = events(WORDS, counted=True)[: words + 1]
        backends[0].script = script(s.SSE_HEAD + framed(begun) + last, then=then)
        engine = backends[1].script = Engine(counted=True, prompt=PROMPT_TOKENS + words)
        gateway = await start(start_gateway, backends, timeouts={"idle": 5})
        answer = await ask(gateway, COUNTED)
        assert (answer.status, answer.complete) == (200, True)
        assert text_of(answer.body) == "".join(WORDS)
        chunks = chunks_of(answer.body)
        assert chunks[-1]["usage"] == usage(len(WORDS), PROMPT_TOKENS)
        assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}
        (asked,) = engine.asked
        assert (asked["max_tokens"], asked["min_tokens"]) == (64 - words, 3 - words)
        (line,) = await gateway.logged()
        assert (line["outcome"], line["attempts"], line["output_tokens"]) == ("complete", 2, len(WORDS))
        assert line["migrated_from"] == f"127.0.0.1:{backends[0].port}"
        assert line["backend"] == f"127.0.0.1:{backends[1].port}"
        await at_rest(gateway)
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_migrations_total", reason=reason) == 1
        assert samples.value("tokenpipe_requests_total", outcome="complete") == 1
        assert samples.value("tokenpipe_time_to_first_token_seconds_count") == 1
        # every gap, that at the seam included, is counted once
        assert samples.value("tokenpipe_inter_token_latency_seconds_count") == len(WORDS) - 1
