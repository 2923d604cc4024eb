"""Rows of deploy/mock.md: the engine's capacity and health, and KV from prefill to decode."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest

from gateway.synthetic.server import SyntheticUpstream
from tests.support.upstream import listening_socket
from tests.synthetic.conftest import COMPLETIONS, MESSAGES, RESPONSES, metric, request
from tests.synthetic.trial import Trial, contents, sees


def knobs(t: Trial) -> dict[str, object]:
    name, _, value = t.row.partition("=")
    return {name: value}


async def gauges(t: Trial) -> tuple[float, float]:
    """Running and waiting, as vLLM tells it."""
    return await metric(t.mock, "vllm:num_requests_running"), await metric(t.mock, "vllm:num_requests_waiting")


@sees("max_num_seqs=1")
async def slots(t: Trial) -> None:
    await t.start(knobs=knobs(t))
    first = await t.send("itl=5")
    await first.receive_until(b'"role"')
    waiting = [await t.send("") for _ in range(3)]
    heads = [await client.read_response_head() for client in waiting]  # at once, and then nothing
    assert await gauges(t) == (1, 3)
    assert await metric(t.mock, "vllm:num_requests_waiting_by_reason") == 3
    waiting[1].reset()  # who leaves the queue leaves it
    await t.until(lambda: t.mock.waiting == 2)
    first.reset()
    answers = [await waiting[at].read_response_body(heads[at]) for at in (0, 2)]
    assert [len(contents(answer)) for answer in answers] == [6, 6]
    assert await gauges(t) == (0, 0)
    last, first_of_all = await t.log(0), await t.log(2)
    assert first_of_all["events"][-1]["sent_ns"] <= last["events"][1]["sent_ns"]  # one after the other, in order
    assert await metric(t.mock, "vllm:request_queue_time_seconds_count") == 3


@sees("max_num_queued_reqs=1")
async def queue(t: Trial) -> None:
    await t.start(knobs=knobs(t))
    first = await t.send("itl=5")
    await first.receive_until(b'"role"')
    refused = await t.ask("")
    assert (refused.status, refused.get("retry-after")) == (503, "1")
    assert await metric(t.mock, "vllm:admission_rejections_total") == 1
    first.reset()
    await t.until(lambda: t.mock.running == 0)
    assert (await t.ask("")).complete


@sees("kv_blocks=20")
async def blocks(t: Trial) -> None:
    await t.start(knobs=knobs(t))
    long = await t.send("itl=5", max_tokens=250, ignore_eos=True)  # 16 blocks and a bit
    await long.receive_until(b'"role"')
    assert await metric(t.mock, "vllm:kv_cache_usage_perc") == pytest.approx(0.8, abs=0.05)
    small = await t.ask("")
    assert small.complete
    big = await t.send("", max_tokens=100, ignore_eos=True)
    await big.read_response_head()
    assert await gauges(t) == (1, 1)
    long.reset()
    await big.receive_until(b"[DONE]")


@sees("slowdown=1")
async def slowdown(t: Trial) -> None:
    await t.start(knobs=knobs(t))
    await t.ask("itl=0.005")
    alone = await t.planned()
    assert alone[4] - alone[3] == pytest.approx(0.005, abs=1e-6)
    others = [await t.send("itl=60") for _ in range(2)]
    for other in others:
        await other.receive_until(b'"role"')
    await t.ask("itl=0.005")
    crowded = await t.planned()
    assert crowded[4] - crowded[3] == pytest.approx(0.015, abs=1e-6)


@sees("health=fail")
async def unwell(t: Trial) -> None:
    await t.start()
    assert (await t.get("/health")).status == 200
    await t.get("/admin/synth", "POST", knobs(t))
    assert (await t.get("/health")).status == 503
    assert (await t.ask("")).complete


@sees("health=hang")
async def silent(t: Trial) -> None:
    client = await t.client(await t.start(knobs=knobs(t)))
    await client.send(request("GET", "/health"))
    with pytest.raises(TimeoutError):
        await client.receive(timeout=0.1)


@sees("health=flap:0.1")
async def flapping(t: Trial) -> None:
    await t.start(knobs=knobs(t))
    seen: list[int] = []
    async with asyncio.timeout(5):
        while not re.search("200,.*503,.*200", ",".join(map(str, seen))):
            seen.append((await t.get("/health")).status)
            await asyncio.sleep(0.01)


@sees("startup=0.15")
async def startup(t: Trial) -> None:
    start = time.monotonic()
    await t.start(knobs=knobs(t))
    assert (await t.get("/health")).status == 503
    async with asyncio.timeout(5):
        while (await t.get("/health")).status == 503:
            await asyncio.sleep(0.01)
    assert time.monotonic() - start >= 0.15


@sees("idle_close=0.05")
async def idle_close(t: Trial) -> None:
    client = await t.client(await t.start(knobs=knobs(t)))
    for path in ("/health", "/v1/models"):
        assert (await client.ask(request("GET", path))).status == 200
    await client.wait_closed()
    assert client.ended == "fin"


# prefill and decode ---------------------------------------------------------------------------------------------------

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
PROMPT = [{"role": "user", "content": "tell me about the weather in all of Europe " * 20}]
Params = dict[str, Any]


async def pair(t: Trial, **settings: Any) -> tuple[SyntheticUpstream, SyntheticUpstream]:
    return await t.start(role="prefill", **settings), await t.start(role="decode")


async def prefill(t: Trial, prefiller: SyntheticUpstream, **changes: Any) -> Params:
    asked = {"stream": None, "max_tokens": 1, "messages": PROMPT, "kv_transfer_params": PREFILL, **changes}
    params: Params = (await t.ask("", mock=prefiller, **asked)).json()["kv_transfer_params"]
    return params


async def kv(t: Trial, mock: SyntheticUpstream) -> dict[str, Any]:
    found: dict[str, Any] = (await t.get("/admin/synth/kv", mock=mock)).json()
    return found


async def ended(t: Trial, mock: SyntheticUpstream, how: str) -> None:
    async with asyncio.timeout(5):
        while (await kv(t, mock))["ends"][how] != 1:
            await asyncio.sleep(0.01)
    assert (await kv(t, mock))["held"] == []
    assert await metric(mock, f'tokenpipe_mock_kv_handoffs_total{{end="{how}"}}') == 1
    assert await metric(mock, "vllm:kv_cache_usage_perc") == 0


@sees("lease=0.1")
async def lease(t: Trial) -> None:
    prefiller, _ = await pair(t, knobs=knobs(t))
    await prefill(t, prefiller)
    (held,) = (await kv(t, prefiller))["held"]
    assert 0 < held["left_s"] <= 0.1
    await ended(t, prefiller, "expired")
    assert await metric(prefiller, "vllm:nixl_num_kv_expired_reqs_total") == 1


@sees("do_remote_decode")
async def held(t: Trial) -> None:
    prefiller, _ = await pair(t)
    params = await prefill(t, prefiller)
    assert list(params)[:7] == [
        "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
        "remote_host", "remote_port",
    ]  # fmt: skip
    assert (params["do_remote_prefill"], params["remote_host"], params["tp_size"]) == (True, "127.0.0.1", 1)
    assert params["remote_port"] == int(prefiller.url.rpartition(":")[2])
    assert len(params["remote_block_ids"][0]) == -(-params["remote_num_tokens"] // 16)
    (one,) = (await kv(t, prefiller))["held"]
    assert one["request_id"] == params["remote_request_id"]
    assert await metric(prefiller, "vllm:kv_cache_usage_perc") > 0
    extras = {COMPLETIONS: {"prompt": "hello"}, RESPONSES: {"input": "hello"}, MESSAGES: {"messages": PROMPT}}
    for path, extra in extras.items():
        asked: dict[str, Any] = {"stream": None, "kv_transfer_params": PREFILL, **extra}
        assert (await t.ask("", mock=prefiller, path=path, **asked)).json()["kv_transfer_params"]["remote_request_id"]
    plain = await t.start()  # without a connector nobody knows what it is
    assert await prefill(t, plain) is None


@sees("do_remote_decode, streamed")
async def held_streamed(t: Trial) -> None:
    prefiller, _ = await pair(t)
    answer = await t.ask("", mock=prefiller, messages=PROMPT, kv_transfer_params=PREFILL)
    assert b"remote_request_id" not in answer.body
    assert len((await kv(t, prefiller))["held"]) == 1


@sees("do_remote_decode, n=2")
async def held_twice(t: Trial) -> None:
    prefiller, _ = await pair(t)
    params = await prefill(t, prefiller, n=2)
    held = (await kv(t, prefiller))["held"]
    assert len(held) == 2 and held[0]["request_id"] == params["remote_request_id"]


@sees("do_remote_decode, left")
async def prefill_left(t: Trial) -> None:
    prefiller, _ = await pair(t)
    client = await t.send("ttft=30", mock=prefiller, stream=None, messages=PROMPT, kv_transfer_params=PREFILL)
    await t.until(lambda: prefiller.running == 1)
    client.reset()
    await t.until(lambda: prefiller.running == 0)
    assert (await kv(t, prefiller))["held"] == []
    assert await metric(prefiller, "vllm:kv_cache_usage_perc") == 0


@sees("do_remote_prefill")
async def pulled(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = await prefill(t, prefiller)
    answer = await t.ask("", mock=decoder, messages=PROMPT, kv_transfer_params=params, seed=1)
    assert answer.text() == (await t.ask("", mock=decoder, messages=PROMPT, seed=1)).text()
    await ended(t, prefiller, "pulled")
    whole = await t.ask("", mock=decoder, stream=None, messages=PROMPT, kv_transfer_params=await prefill(t, prefiller))
    assert whole.json()["kv_transfer_params"] is None


@sees("do_remote_prefill, too late")
async def too_late(t: Trial) -> None:
    prefiller, decoder = await pair(t, knobs={"lease": 0.05})
    params = await prefill(t, prefiller)
    await ended(t, prefiller, "expired")
    answer = await t.ask("", mock=decoder, messages=PROMPT, kv_transfer_params=params, seed=1)
    assert answer.complete and answer.events()[-1] == "[DONE]"
    assert answer.text() != (await t.ask("", mock=decoder, messages=PROMPT, seed=1)).text()
    assert (await kv(t, prefiller))["unknown"] == 1


@sees("do_remote_prefill, twice")
async def twice(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = await prefill(t, prefiller)
    said = [await t.ask("", mock=decoder, messages=PROMPT, kv_transfer_params=params, seed=1) for _ in range(2)]
    assert said[0].text() != said[1].text()
    assert (await kv(t, prefiller))["unknown"] == 1


@sees("do_remote_prefill, refused")
async def decode_refused(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = await prefill(t, prefiller)
    refused = await t.ask("", mock=decoder, messages=PROMPT, kv_transfer_params=params, max_tokens=-1)
    assert refused.status == 400
    await ended(t, prefiller, "rejected")


@sees("do_remote_prefill, left")
async def decode_left(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = await prefill(t, prefiller)
    await t.get("/admin/synth", "POST", {"max_num_seqs": 1}, mock=decoder)
    first = await t.send("itl=30", mock=decoder)
    await first.receive_until(b'"role"')
    client = await t.send("", mock=decoder, messages=PROMPT, kv_transfer_params=params)
    await t.until(lambda: decoder.waiting == 1)
    client.reset()
    await ended(t, prefiller, "rejected")


async def pull_failed(t: Trial, **changes: Any) -> None:
    prefiller, decoder = await pair(t)
    params = {**await prefill(t, prefiller), **changes}
    answer = await t.ask("", mock=decoder, messages=PROMPT, kv_transfer_params=params)
    assert json.loads(answer.events()[-2])["error"] == {
        "message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500,
    }  # fmt: skip
    assert answer.complete and answer.events()[-1] == "[DONE]"
    assert (await t.ask("", mock=decoder, stream=None, messages=PROMPT, kv_transfer_params=params)).status == 500
    assert len((await kv(t, prefiller))["held"]) == 1
    assert await metric(decoder, 'vllm:request_success_total{engine="0",finished_reason="error"') == 2


@sees("do_remote_prefill, another engine")
async def another_engine(t: Trial) -> None:
    await pull_failed(t, remote_engine_id="somebody-else")


@sees("do_remote_prefill, unreachable")
async def unreachable(t: Trial) -> None:
    with listening_socket() as taken:
        port = taken.getsockname()[1]
    await pull_failed(t, remote_port=port)


@sees("do_remote_prefill, nothing besides")
async def fatal(t: Trial) -> None:
    decoder = await t.start(role="decode")
    answer = await t.ask("", kv_transfer_params={"do_remote_prefill": True})
    assert "EngineCore encountered an issue" in answer.events()[-2]
    assert (await t.get("/health", mock=decoder)).status == 503


@sees("do_remote_prefill, no engine id")
async def for_ever(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = {**await prefill(t, prefiller), "remote_engine_id": None}
    client = await t.send("", mock=decoder, messages=PROMPT, kv_transfer_params=params)
    await client.read_response_head()
    with pytest.raises(TimeoutError):
        await client.receive(timeout=0.1)
    assert (await t.ask("", mock=decoder)).complete  # the others go on


@sees("GET /admin/synth/kv")
async def ledger(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = [await prefill(t, prefiller) for _ in range(3)]
    await t.ask("", mock=decoder, messages=PROMPT, kv_transfer_params=params[0])
    found = await kv(t, prefiller)
    assert [one["request_id"] for one in found["held"]] == [one["remote_request_id"] for one in params[1:]]
    assert found["ends"] == {"pulled": 1, "rejected": 0, "expired": 0, "aborted": 0}
    assert all(25 < one["left_s"] <= 30 for one in found["held"])
    assert (await t.get("/admin/synth/kv", mock=await t.start())).status == 404
