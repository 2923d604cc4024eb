"""Options that change an answer, or keep something of it: cached_tokens, prompt_logprobs, conversations; and the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import script as s
from tests.support.disagg import BODIES, PATHS, Start, mocks, said, undisturbed
from tests.support.messages import HttpWire, Message
from tests.support.pairs import Ledger, at_rest, config, decode, engines

FRAMES = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":3,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":3}}}\n\n',
    b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
)
USAGE = b'data: {"id":"c", "choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":%b}}\n\n'
DONE = b"data: [DONE]\n\n"


def told_by_prefill(ledger: Ledger, details: Any, **more: Any) -> s.Script:
    """An answer whose usage has these details."""

    async def script(wire: HttpWire, request: Message) -> None:
        params = ledger.hold(request.get("x-request-id") or "")
        usage = {"prompt_tokens": 3, "completion_tokens": 1} | ({} if details is None else {"prompt_tokens_details": details})
        choices = [{"index": 0, "finish_reason": "length"}]
        await s.reply(200, {"choices": choices, "usage": usage, "kv_transfer_params": params, **more})(wire, request)

    return script


@pytest.mark.parametrize(
    ("details", "wanted"),
    [({"cached_tokens": 2}, b'{"cached_tokens":2}'), ({"cached_tokens": 0}, b'{"cached_tokens":0}'), (None, b"null")],
)
async def test_cached_tokens_of_a_stream(start_gateway: Start, details: Any, wanted: bytes) -> None:
    """Prefill's figure, in the last usage alone; where it said none, decode's wrong one goes (case 41). All else as it came."""
    async with engines() as ((p,), (d,), ledger):
        p.script = told_by_prefill(ledger, details)
        sent = (*FRAMES, USAGE % b'{"cached_tokens":3}', DONE)

        async def answered(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD + b"".join(map(s.chunk, sent)) + s.LAST)

        d.script = decode(ledger, answered)
        gateway = await start_gateway(config=config([p], [d], disaggregation={"cached_tokens": "prefill"}))
        body = {**s.CHAT, "stream": True, "stream_options": {"include_usage": True}}
        assert (await gateway.ask(s.post(body))).body == b"".join((*FRAMES, USAGE % wanted, DONE))
        other = await start_gateway(config=config([p], [d]))
        assert (await other.ask(s.post(body))).body == b"".join(sent)
        await at_rest(gateway, ledger, p, d)


async def test_cached_tokens_of_a_whole_answer(start_gateway: Start) -> None:
    async with engines() as ((p,), (d,), ledger):
        p.script = told_by_prefill(ledger, {"cached_tokens": 2})
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}

        async def script(wire: HttpWire, request: Message) -> None:
            ledger.fetch(request)
            assert request.get("accept-encoding") is None  # what is coded could not be changed
            await s.reply(200, {"choices": [{"index": 0, "finish_reason": "stop"}], "usage": usage})(wire, request)

        d.script = script
        gateway = await start_gateway(config=config([p], [d], disaggregation={"cached_tokens": "prefill"}))
        answer = await gateway.ask(s.post({**s.CHAT, "stream": False}, fields=[("Accept-Encoding", "gzip")]))
        assert answer.json()["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 2}}
        await at_rest(gateway, ledger, p, d)


LOGPROBS = [None, {"7": {"logprob": -0.5, "rank": 1}}]


async def test_prompt_logprobs_merged(start_gateway: Start) -> None:
    """Prefill computes them; decode never sees that they were asked for; a stream is refused (case 9)."""
    async with engines() as ((p,), (d,), ledger):
        p.script = told_by_prefill(ledger, None, prompt_logprobs=LOGPROBS)
        gateway = await start_gateway(config=config([p], [d], disaggregation={"prompt_logprobs": "merge"}))
        body = {**s.CHAT, "stream": False, "prompt_logprobs": 1}
        answer = await gateway.ask(s.post(body))
        assert answer.json() == {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}],
                                 "prompt_logprobs": LOGPROBS}  # fmt: skip
        assert p.requests[0].json()["prompt_logprobs"] == 1
        assert "prompt_logprobs" not in d.requests[0].json()
        refused = await gateway.ask(s.post({**body, "stream": True}))
        assert (refused.status, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
        rejecting = await start_gateway(config=config([p], [d]))
        assert (await rejecting.ask(s.post(body))).status == 400
        assert len(p.requests) == len(d.requests) == 1
        await at_rest(gateway, ledger, p, d)


async def test_a_conversation(start_gateway: Start) -> None:
    """What decode says in one turn, prefill fetches in the next, once; engines are not told of the conversation."""
    async with mocks("nixl_bidirectional") as both:
        gateway = await start_gateway(config=both.config())
        body = {**BODIES["chat"], "stream": False, "conversation_id": "c1"}
        for turn in range(2):
            answer = await gateway.ask(s.post({**body, "seed": turn}))
            assert answer.status == 200 and answer.get("content-length") is not None
            assert said(answer.json()) == await undisturbed(PATHS["chat"], {**BODIES["chat"], "seed": turn})
        (decoder,) = await both.states(both.decodes)
        (prefiller,) = await both.states(both.prefills)
        assert (prefiller["ends"]["pulled"], decoder["ends"]["pulled"]) == (2, 1)
        assert prefiller["loaded"] == 1


async def test_conversations_of_one_name(start_gateway: Start) -> None:
    """Another client's turn fetches nothing of it, and takes nothing from it."""
    async with mocks("nixl_bidirectional") as both:
        gateway = await start_gateway(config=both.config())
        body = {**BODIES["chat"], "stream": False, "conversation_id": "c1"}
        for key, loaded in (("a", 0), ("b", 0), ("a", 1)):
            answer = await gateway.ask(s.post(body, fields=[("Authorization", f"Bearer {key}")]))
            assert answer.status == 200
            (prefiller,) = await both.states(both.prefills)
            assert prefiller["loaded"] == loaded, key


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_is_asked_first(start_gateway: Start, stream: bool, tmp_path: Path) -> None:
    """It says that it misses the prompt before anything has passed; once it has it, prefill is not asked any more."""
    async with mocks("shared_storage", knobs={"store": str(tmp_path / "kv")}) as both:
        gateway = await start_gateway(config=both.config())
        body = {**BODIES["chat"], "stream": stream}
        wanted = await undisturbed(PATHS["chat"], body)
        for prefilled in (1, 1):
            answer = await gateway.ask(s.post(json.dumps(body).encode()))
            assert (answer.text() if stream else said(answer.json())) == wanted
            samples = await gateway.metrics()
            assert samples.value("tokenpipe_pd_prefill_seconds_count") == prefilled
        assert samples.value("tokenpipe_pd_bypass_total") == 1
        (decoder,) = await both.states(both.decodes)
        assert (decoder["loaded"], decoder["recomputed"]) == (2, 0)
        await both.at_rest(gateway)


async def test_recomputed_is_relayed_and_counted(start_gateway: Start) -> None:
    """What vLLM Ascend says of a request that it has dropped is the client's to see (case 44)."""
    said = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop","stop_reason":"recomputed"}]}\n\n'
    async with engines() as ((p,), (d,), ledger):

        async def dropped(wire: HttpWire, request: Message) -> None:
            await wire.send(s.SSE_HEAD + b"".join(map(s.chunk, (FRAMES[0], said, DONE))) + s.LAST)

        d.script = decode(ledger, dropped)
        gateway = await start_gateway(config=config([p], [d]))
        assert await gateway.metric("tokenpipe_pd_recomputed_total") == 0
        assert (await gateway.ask()).body == b"".join((FRAMES[0], said, DONE))
        await at_rest(gateway, ledger, p, d)
        assert await gateway.metric("tokenpipe_pd_recomputed_total") == 1
