"""Rows of deploy/mock.md: connectors other than NIXL's pull, each with what is right and what is wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from gateway.synthetic.server import SyntheticUpstream
from tests.synthetic.checks_engine import PROMPT, kv
from tests.synthetic.conftest import COMPLETIONS, metric
from tests.synthetic.trial import Trial, finishes, sees

ID = "0123456789abcdef" * 2
P: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
D: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}


def port(mock: SyntheticUpstream) -> int:
    return int(mock.url.rpartition(":")[2])


async def pair(t: Trial, **settings: Any) -> tuple[SyntheticUpstream, SyntheticUpstream]:
    more = {"connector": t.row.partition(",")[0], **settings}
    return await t.start(role="prefill", **more), await t.start(role="decode", **more)


async def prefill(t: Trial, mock: SyntheticUpstream, params: Any = None, **changes: Any) -> dict[str, Any]:
    asked = {"stream": None, "max_tokens": 1, "messages": PROMPT, **changes}
    if params is not None:
        asked["kv_transfer_params"] = params
    found: dict[str, Any] = (await t.ask("", mock=mock, **asked)).json()
    return found


async def decode(t: Trial, mock: SyntheticUpstream, params: Any = None, **changes: Any) -> str:
    asked = {"messages": PROMPT, "seed": 1, **changes}
    if params is not None:
        asked["kv_transfer_params"] = params
    return (await t.ask("", mock=mock, **asked)).text()


async def undisturbed(t: Trial) -> str:
    return await decode(t, await t.start(connector=None, role="both"))


async def settled(t: Trial, mock: SyntheticUpstream, **ends: int) -> None:
    """Nothing is held, and these ends there were."""
    async with asyncio.timeout(5):
        while (found := await kv(t, mock))["held"] or {k: v for k, v in found["ends"].items() if v} != ends:
            await asyncio.sleep(0.01)
    assert await metric(mock, "vllm:kv_cache_usage_perc") == 0


async def spared(t: Trial, mock: SyntheticUpstream, loaded: int = 1, recomputed: int = 0) -> None:
    found = await kv(t, mock)
    assert (found["loaded"], found["recomputed"]) == (loaded, recomputed)
    assert await metric(mock, "tokenpipe_mock_kv_recomputed_total") == recomputed


async def waits(t: Trial, mock: SyntheticUpstream, **changes: Any) -> None:
    """A decode request gets a head, and then nothing."""
    client = await t.send("", mock=mock, messages=PROMPT, **changes)
    await client.read_response_head()
    with pytest.raises(TimeoutError):
        await client.receive(timeout=0.1)
    client.reset()


async def dies(t: Trial, mock: SyntheticUpstream, **changes: Any) -> None:
    answer = await t.ask("", mock=mock, messages=PROMPT, **changes)
    assert "EngineCore encountered an issue" in answer.body.decode()
    assert (await t.get("/health", mock=mock)).status == 503


@sees("do_remote_prefill, incomplete")
async def incomplete(t: Trial) -> None:
    decoder, prefiller = await t.start(role="decode", ttft="per_token:0:0.01"), await t.start(role="prefill")
    params = (await prefill(t, prefiller, P))["kv_transfer_params"]
    assert await decode(t, decoder, {**params, "remote_port": None}) == await undisturbed(t)
    computed = (await t.planned())[1]
    await spared(t, decoder, 0, 1)
    await decode(t, decoder, params)
    await spared(t, decoder, 1, 1)
    assert (await t.planned())[1] < computed >= 0.01 * params["remote_num_tokens"]
    await settled(t, prefiller, pulled=1)


@sees("nixl_push")
async def nixl_push(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = (await prefill(t, prefiller, P))["kv_transfer_params"]
    assert params["transfer_mode"] == "push"
    assert (await t.ask("", mock=decoder, stream=None, messages=PROMPT, kv_transfer_params=params)).status == 500
    del params["remote_block_ids"]
    assert await decode(t, decoder, params) == await undisturbed(t)
    await settled(t, prefiller, pulled=1)
    await spared(t, decoder)


@sees("nixl_bidirectional")
async def bidirectional(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = (await prefill(t, prefiller, P))["kv_transfer_params"]
    whole = await t.ask("", mock=decoder, stream=None, messages=PROMPT, kv_transfer_params=params)
    kept = whole.json()["kv_transfer_params"]
    assert len((await kv(t, decoder))["held"]) == 1
    for loaded, recomputed in ((1, 0), (1, 1)):  # a second time there is nothing left
        await prefill(t, prefiller, {**kept, "do_remote_decode": True})
        await spared(t, prefiller, loaded, recomputed)
    await settled(t, decoder, pulled=1)


@sees("mooncake")
async def mooncake(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    told = (await t.get("/query", mock=prefiller)).json()
    params = {**D, "transfer_id": "xfer-1", "remote_bootstrap_addr": prefiller.url, "remote_engine_id": told["0"]["engine_id"]}
    ours = {**P, "transfer_id": "xfer-1"}
    said, _ = await asyncio.gather(decode(t, decoder, params), prefill(t, prefiller, ours))  # in whatever order
    assert said == await undisturbed(t)
    await settled(t, prefiller, pulled=1)
    asked = {"stream": None, "messages": PROMPT}
    wrong = await t.ask("", mock=decoder, kv_transfer_params={**params, "remote_engine_id": "old"}, **asked)
    assert wrong.status == 500
    await decode(t, decoder, {**params, "transfer_id": None})
    await spared(t, decoder, 1, 1)
    await prefill(t, prefiller, {**P})
    await settled(t, prefiller, pulled=1)
    await dies(t, prefiller, kv_transfer_params=params)


@sees("mooncake, ended by itself")
async def ended_by_itself(t: Trial) -> None:
    prefiller, decoder = await pair(t, tokens=1)
    told = (await t.get("/query", mock=prefiller)).json()
    params = {**D, "transfer_id": "xfer-1", "remote_bootstrap_addr": prefiller.url, "remote_engine_id": told["0"]["engine_id"]}
    ended = await prefill(t, prefiller, {**P, "transfer_id": "xfer-1"}, max_tokens=9)
    assert ended["choices"][0]["finish_reason"] == "stop"
    await waits(t, decoder, kv_transfer_params=params)
    await prefill(t, prefiller, {**P, "transfer_id": "xfer-2"}, min_tokens=1)  # cut by its length
    assert len((await kv(t, prefiller))["held"]) == 1


@sees("mooncake_ascend")
async def mooncake_ascend(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = (await prefill(t, prefiller, P, min_tokens=1))["kv_transfer_params"]
    assert {"remote_ptp_size", "last_token_id", "remote_multi_nodes_meta_mapping"} <= params.keys()
    (held,) = (await kv(t, prefiller))["held"]
    assert 470 < held["left_s"] <= 480
    assert await decode(t, decoder, params) == await undisturbed(t)
    await settled(t, prefiller, pulled=1)


@sees("layerwise")
async def layerwise(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    posted: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def metaserver(request: web.Request) -> web.Response:
        posted.put_nowait(await request.json())
        return web.json_response({}, status=502)  # which it does not heed

    app = web.Application()
    app.router.add_post("/v1/metaserver", metaserver)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        params = {**D, "metaserver": f"http://127.0.0.1:{runner.addresses[0][1]}/v1/metaserver"}
        fields = f"X-Request-Id: {ID}\r\n"
        asked = asyncio.ensure_future(decode(t, decoder, params, fields=fields))
        called = await asyncio.wait_for(posted.get(), 5)
        assert called["request_id"] == f"chatcmpl-{ID}" and called["do_remote_decode"]
        await prefill(t, prefiller, called)
        assert await asked == await undisturbed(t)
        await settled(t, decoder, pulled=1)
        more = {"kv_transfer_params": params, "fields": fields}
        left = await t.send("", mock=decoder, path=COMPLETIONS, prompt=["a", "b"], **more)
        names = [(await asyncio.wait_for(posted.get(), 5))["request_id"] for _ in range(2)]
        assert names == [f"cmpl-{ID}-0", f"cmpl-{ID}-1"]
        left.reset()
        await settled(t, decoder, pulled=1, aborted=2)
    finally:
        await runner.cleanup()


@sees("p2p_nccl")
async def p2p_nccl(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    name = f"___prefill_addr_127.0.0.1:{port(prefiller)}___decode_addr_127.0.0.1:{port(decoder)}_"
    fields = f"X-Request-Id: {name}{ID}\r\n"
    await prefill(t, prefiller, fields=fields)
    assert await decode(t, decoder, fields=fields) == await undisturbed(t)
    await settled(t, prefiller, pulled=1)
    await prefill(t, prefiller, fields=fields)
    await waits(t, decoder, fields=f"X-Request-Id: {name}{ID[::-1]}\r\n")
    assert [one["left_s"] for one in (await kv(t, prefiller))["held"]] == [None]
    await dies(t, decoder, fields=f"X-Request-Id: {ID}\r\n")


@sees("moriio_read")
async def moriio_read(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    params = (await prefill(t, prefiller, {**P, "transfer_id": "tx1"}))["kv_transfer_params"]
    assert params["transfer_id"] == "tx1" and params["remote_dp_rank"] == 0
    assert await decode(t, decoder, params) == await undisturbed(t)
    await settled(t, prefiller, pulled=1)
    await dies(t, decoder, kv_transfer_params={**params, "remote_block_ids": None})


@sees("moriio_write")
async def moriio_write(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    ours = {"transfer_id": "tx1", "remote_host": "127.0.0.1"}
    there = {**D, **ours, "remote_notify_port": port(prefiller), "remote_block_ids": []}
    here = {**P, **ours, "remote_notify_port": port(decoder)}
    said, _ = await asyncio.gather(decode(t, decoder, there), prefill(t, prefiller, here))
    assert said == await undisturbed(t)
    await settled(t, prefiller, pulled=1)
    await dies(t, decoder, kv_transfer_params={**there, "remote_block_ids": None})


@sees("lmcache", "store=/tmp/kv")
async def lmcache(t: Trial) -> None:
    prefiller, decoder = await pair(t, connector="lmcache", knobs={"store": str(t.folder / "kv")})
    await prefill(t, prefiller)
    assert await decode(t, decoder) == await undisturbed(t)
    await spared(t, decoder)
    await decode(t, decoder, messages=[{"role": "user", "content": "another"}])
    await spared(t, decoder, 1, 1)
    assert len(list((t.folder / "kv").iterdir())) == 2


@sees("shared_storage")
async def shared_storage(t: Trial) -> None:
    prefiller, decoder = await pair(t, knobs={"store": str(t.folder)})
    missed = await t.ask("", mock=decoder, messages=PROMPT, cache_hit_threshold=0.8)
    assert finishes(missed) == ["cache_threshold"] and missed.text() == ""
    whole = await t.ask("", mock=decoder, stream=None, messages=PROMPT, cache_hit_threshold=0.8)
    assert whole.json()["choices"][0]["finish_reason"] == "cache_threshold"
    await prefill(t, prefiller, cache_hit_threshold=0)
    assert await decode(t, decoder, cache_hit_threshold=0.8) == await undisturbed(t)
    await spared(t, decoder)


@sees("offloading_p2p")
async def offloading(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    source = {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": port(prefiller)}
    asked = asyncio.ensure_future(decode(t, decoder, {"remote_prefiller": source}))
    await prefill(t, prefiller, {"remote_decoder": {"kv_request_id": "r"}})
    assert await asked == await undisturbed(t)
    await settled(t, prefiller, pulled=1)
    await decode(t, decoder, {"remote_prefiller": {**source, "remote_port": 1}})
    await spared(t, decoder, 1, 1)


def room(prefiller: SyntheticUpstream, number: int) -> dict[str, Any]:
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port(prefiller), "bootstrap_room": number, "seed": 1}


@sees("sglang")
async def sglang(t: Trial) -> None:
    prefiller, decoder = await pair(t)
    meeting = room(prefiller, 2**63 - 1)
    asked = asyncio.ensure_future(t.ask("", mock=prefiller, stream=None, messages=PROMPT, **meeting))
    await t.until(lambda: prefiller.running == 0 and not asked.done())
    done, _ = await asyncio.wait([asked], timeout=0.1)
    assert not done  # it waits for its decoder
    assert await decode(t, decoder, **meeting) == await undisturbed(t)
    assert (await asked).json()["usage"]["completion_tokens"] == 1
    await settled(t, prefiller, pulled=1)
    assert (await t.ask("", mock=decoder, messages=PROMPT)).status == 400
    left = await t.send("", mock=prefiller, stream=None, messages=PROMPT, **room(prefiller, 5))
    async with asyncio.timeout(5):
        while not (await kv(t, prefiller))["held"]:
            await asyncio.sleep(0.01)
    left.reset()
    await settled(t, prefiller, pulled=1, aborted=1)
    await t.get("/admin/synth", "POST", {"lease": 0.1}, mock=prefiller)
    alone = await t.ask("", mock=prefiller, stream=None, messages=PROMPT, **room(prefiller, 6))
    assert alone.status == 500 and "timed out" in alone.body.decode()


@sees("sglang, a room twice")
async def room_twice(t: Trial) -> None:
    prefiller, _ = await pair(t)
    first = await t.send("", mock=prefiller, messages=PROMPT, **room(prefiller, 7))
    await first.read_response_head()
    await dies(t, prefiller, **room(prefiller, 7))


@sees("--role encode")
async def encode(t: Trial) -> None:
    encoder = await t.start(role="encode")
    item = {"type": "image_url", "image_url": {"url": "http://x/1.png"}}
    found = await prefill(t, encoder, messages=[{"role": "user", "content": [item]}])
    (place,) = found["ec_transfer_params"].values()
    assert place["peer_port"] == port(encoder)
    assert json.loads(json.dumps(found))["usage"]["completion_tokens"] == 1
