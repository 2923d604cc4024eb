"""Every connector that the gateway speaks, against engines that keep a ledger: the text is that of one engine alone, nothing
is computed twice, nothing stays behind, whoever leaves and whenever."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from gateway.configdisagg import Connector
from gateway.synthetic.server import SyntheticUpstream
from tests.support.disagg import BODIES, PATHS, Start, mocks, port_of, said, undisturbed
from tests.support.gateway import Gateway
from tests.support.script import post

NAMES = [name for name in Connector.__args__ if name != "sidecar"]
# whose engines tell nobody that they compute a prompt: that it was spared shows in `loaded`
STORES = ("lmcache", "shared_storage")


def request(path: str, body: dict[str, Any], **changes: Any) -> bytes:
    return post(json.dumps({**body, **changes}).encode(), path)


def options(name: str, folder: Path) -> dict[str, Any]:
    return {"knobs": {"store": str(folder / "kv")}} if name in STORES else {}


@pytest.mark.parametrize("name", NAMES)
async def test_the_text_of_one_engine(start_gateway: Start, name: str, tmp_path: Path) -> None:
    async with mocks(name, **options(name, tmp_path)) as engines:
        gateway = await start_gateway(config=engines.config())
        count = 0
        for api, path in PATHS.items():
            for stream in (True, False):
                body = {**BODIES[api], "stream": stream}
                asked = post(json.dumps(body).encode(), path, fields=[("X-Request-Id", "mine")])  # 59: no engine sees that
                answer = await gateway.ask(asked)
                assert answer.status == 200, answer.body
                assert answer.get("x-request-id") == "mine"
                assert answer.get("content-type", "").startswith("text/event-stream" if stream else "application/json")
                text = answer.text() if stream else said(answer.json())
                assert text == await undisturbed(path, body)
                count += 1
        await engines.at_rest(gateway)
        (decoder,) = await engines.states(engines.decodes)
        assert (decoder["loaded"], decoder["recomputed"]) == (count, 0)
        assert await engines.held() == 0
        samples = await gateway.metrics()
        assert samples.value("tokenpipe_pd_stranded_total") == samples.value("tokenpipe_pd_fallback_total") == 0


@pytest.mark.parametrize("name", NAMES)
async def test_4_one_token(start_gateway: Start, name: str, tmp_path: Path) -> None:
    """Exactly one, with its text, cut by its limit, whoever computes it."""
    async with mocks(name, **options(name, tmp_path)) as engines:
        gateway = await start_gateway(config=engines.config())
        for stream in (True, False):
            for limit in ("max_tokens", "max_completion_tokens"):
                asked = {**BODIES["chat"], "stream": stream, "ignore_eos": True}
                del asked["max_tokens"]
                if stream:
                    asked["stream_options"] = {"include_usage": True}
                answer = await gateway.ask(request(PATHS["chat"], asked, **{limit: 1}))
                assert answer.status == 200, answer.body
                chunks = events(answer.body) if stream else [answer.json()]
                choices = [choice for chunk in chunks for choice in chunk["choices"]]
                assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
                assert answer.text() if stream else said(answer.json())
                assert chunks[-1]["usage"]["completion_tokens"] == 1
        await engines.at_rest(gateway)
        assert await engines.held() == 0
        await over(gateway)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", NAMES)
async def test_7_several_choices(start_gateway: Start, name: str, stream: bool, tmp_path: Path) -> None:
    """One prefill, four choices, and nothing is left; or a refusal that says which connector cannot."""
    async with mocks(name, **options(name, tmp_path)) as engines:
        gateway = await start_gateway(config=engines.config())
        answer = await gateway.ask(request(PATHS["chat"], BODIES["chat"], stream=stream, n=4))
        if name == "p2p_nccl":  # its engines assert on the ids of the choices
            assert answer.status == 400 and b"p2p_nccl" in answer.body
        else:
            assert answer.status == 200 and answer.complete, answer.body
            said = events(answer.body) if stream else [answer.json()]
            assert {choice["index"] for one in said for choice in one["choices"]} == set(range(4))
        await engines.at_rest(gateway)
        assert await engines.held() == await engines.counted("recomputed") == 0
        assert await gateway.metric("tokenpipe_pd_stranded_total") == 0
        await over(gateway)


async def over(gateway: Gateway) -> None:
    """Before the engines are: else it looks after them in the very moment in which they end."""
    gateway.signal(15)
    await gateway.stopped()


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


@pytest.mark.parametrize("name", NAMES)
async def test_40_content_types(start_gateway: Start, name: str, tmp_path: Path) -> None:
    async with mocks(name, **options(name, tmp_path)) as engines:
        gateway = await start_gateway(config=engines.config())
        for path, body in zip(PATHS.values(), BODIES.values(), strict=True):
            for stream, wanted in ((True, "text/event-stream; charset=utf-8"), (False, "application/json")):
                assert (await gateway.ask(request(path, body, stream=stream))).get("content-type") == wanted
        await engines.at_rest(gateway)
        await over(gateway)


@pytest.mark.parametrize("name", NAMES)
async def test_a_decode_that_takes_no_connections(start_gateway: Start, name: str, tmp_path: Path) -> None:
    """What prefill was told of that one, it must be told anew of the other one: else the two never meet."""
    async with mocks(name, 1, 2, **options(name, tmp_path)) as engines:
        gateway = await start_gateway(config=engines.config(release_timeout=1))
        gone, other = engines.decodes
        await gone.stop()
        engines.decodes.remove(gone)
        for seed in range(3):  # whichever of them is tried first
            body = {**BODIES["chat"], "stream": True, "seed": seed}
            answer = await gateway.ask(request(PATHS["chat"], body))
            assert (answer.status, answer.text()) == (200, await undisturbed(PATHS["chat"], body))
        await engines.at_rest(gateway)
        assert other.running == 0 == await engines.counted("recomputed")
        await over(gateway)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
async def test_56_an_engine_is_started_anew(start_gateway: Start, name: str, side: str, tmp_path: Path) -> None:
    """At the same place, under another engine id: whoever asks next gets what one engine alone would say, and the KV of both
    legs is of one engine."""
    async with mocks(name, **options(name, tmp_path)) as engines:
        gateway = await start_gateway(config=engines.config(release_timeout=1))
        body = {**BODIES["chat"], "stream": True}
        wanted = await undisturbed(PATHS["chat"], body)
        assert (await gateway.ask(request(PATHS["chat"], body))).text() == wanted
        await engines.at_rest(gateway)
        alike = engines.prefills if side == "prefill" else engines.decodes
        (old,) = alike
        await old.stop()
        alike[0] = new = SyntheticUpstream(dataclasses.replace(old.settings, port=port_of(old)))
        await new.start()
        try:
            for seed in range(3):
                body = {**BODIES["chat"], "stream": True, "seed": seed}
                answer = await gateway.ask(request(PATHS["chat"], body))
                assert (answer.status, answer.text()) == (200, await undisturbed(PATHS["chat"], body))
            await engines.at_rest(gateway)
            assert await engines.counted("recomputed") == 0 or name in STORES
            await over(gateway)
        finally:
            await new.stop()


@pytest.mark.parametrize("name", NAMES)
async def test_leaving_at_any_moment(start_gateway: Start, name: str, tmp_path: Path) -> None:
    """Fifty clients, streaming and not, each at a random moment of an exchange; then one that stays gets what it is to get."""
    chance = random.Random(name)
    async with mocks(name, 2, 2, **options(name, tmp_path)) as engines:
        gateway = await start_gateway(config=engines.config(hold=2, release_timeout=2))
        # what nobody fetches is over within the test, as it would be on an engine
        await engines.turn(engines.all, lease=2)

        async def one() -> None:
            client = await gateway.connect()
            await client.send(request(PATHS["chat"], BODIES["chat"], stream=chance.random() < 0.5))
            await asyncio.sleep(chance.uniform(0, 0.07))
            client.reset()

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(5)))
        await engines.at_rest(gateway)
        body = {**BODIES["chat"], "stream": True, "seed": 8}
        assert (await gateway.ask(request(PATHS["chat"], body))).text() == await undisturbed(PATHS["chat"], body)
        await engines.at_rest(gateway)
        assert await engines.counted("recomputed") == 0 or name in STORES
