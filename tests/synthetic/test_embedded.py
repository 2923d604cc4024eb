"""The same engine within the gateway: behind `/loadtest/v1`, and where there is no backend."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.gateway import Gateway
from tests.support.script import post
from tests.synthetic.trial import contents

ASK = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 50}
MOCK = {"ttft": 0, "itl": 0, "tokens": "uniform:3:5", "seed": 7, "fault": ["status:503@request:4"], "knobs": {"eol": "crlf"}}


async def test_faults_behind_the_gateway(start_gateway: Callable[..., Awaitable[Gateway]]) -> None:
    gateway = await start_gateway(config={"loadtest": {"enabled": True}, "mock": MOCK}, ready=False)

    async def ask(asked: str = "", path: str = "/loadtest/v1/chat/completions") -> Any:
        fields = [("x-synth", asked)] if asked else []
        return await gateway.ask(post(ASK, path, fields))

    answer = await ask()
    assert 3 <= len(contents(answer)) <= 5 and b"\r\n\r\n" in answer.body
    answer = await ask("fault=close@token:2")
    assert (answer.complete, len(contents(answer))) == (False, 2)
    answer = await ask("fault=error_event@token:1", "/v1/chat/completions")
    assert "error" in json.loads(answer.events()[-2])
    assert (await ask()).status == 503  # the fourth, as the configuration has it
    refused = await ask("fault=cpu:1000")
    assert refused.status == 400 and "would hold up the gateway" in refused.body.decode()
    outcomes = [entry["outcome"] for entry in await gateway.logged(5)]
    assert outcomes == ["complete", "upstream_reset", "stream_error", "upstream_status", "upstream_status"]
