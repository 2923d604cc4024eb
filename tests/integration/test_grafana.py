"""deploy/grafana and deploy/prometheus as an operator has them: a real Prometheus scrapes a loaded gateway, and answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import yaml

from tests.support import pairs
from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import ROOT, Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

Start = Callable[..., Awaitable[Gateway]]

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "tokenpipe.json").read_text())
PROMETHEUS = ROOT / "deploy" / "prometheus"
VARIABLES = {"instance": ".*", "model": ".*", "backend": ".*", "__rate_interval": "20s", "__range": "1m"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
USAGE = s.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
                                          "prompt_tokens_details": {"cached_tokens": 5}}})  # fmt: skip
SCRIPTS: dict[str, s.Script] = {
    "complete": s.stream(*[s.delta("a")] * 4, s.delta("", finish="stop"), USAGE, s.DONE, gap=0.02),
    "single": s.stream(s.delta("a"), *s.FINISHED),
    "status": s.reply(429, b"{}"),
    "error": s.stream(s.delta("a"), s.event({"error": {"message": "x", "code": 500}}), s.DONE),
    "truncated": s.stream(s.delta("a")),
    "reset": s.raw(s.SSE_HEAD, s.chunk(s.delta("a")), then="reset"),
    "gone": s.Held(s.SSE_HEAD),
}


async def answer(wire: HttpWire, request: Message) -> None:
    await SCRIPTS[(request.get("x-request-id") or "")](wire, request)


async def load(gateway: Gateway, name: str) -> None:
    client = await gateway.connect()
    traced = ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")
    request = s.post(fields=[("X-Request-Id", name), traced])
    if name == "refused":
        request = request.replace(b"/v1/chat/completions", b"/no/where")
    await client.send(request)
    if name == "gone":
        await asyncio.sleep(0.05)
        client.reset()
    else:
        await client.read_response()
        client.fin()


class Prometheus:
    def __init__(self, port: int) -> None:
        self.port = port

    async def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its HTTP API."""
        client = await RawClient.connect(port=self.port)
        got = await client.ask(s.get(f"/api/v1/{path}?{urlencode(parameters)}"))
        client.fin()
        said = got.json()
        assert said["status"] == "success", (parameters, said)
        return said["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query whose values are numbers."""
        data = await self.get("query", query=expression)
        return [one for one in data["result"] if math.isfinite(float(one["value"][1]))]


@contextlib.asynccontextmanager
async def prometheus(gateway: Gateway, folder: Path) -> AsyncIterator[Prometheus]:
    """With the configuration of deploy/, but for the port to scrape and how often."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{gateway.admin_port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"],
            stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            assert process.poll() is None, (folder / "prometheus.log").read_text()[-3000:]
            with contextlib.suppress(OSError, TimeoutError):
                client = await RawClient.connect(port=port)
                ready = await client.ask(s.get("/-/ready"))
                client.fin()
                if ready.status == 200:
                    break
            await asyncio.sleep(0.1)
        yield Prometheus(port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def filled_in(expression: str) -> str:
    return re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda found: VARIABLES[found[1] or found[2]], expression)


def targets(*, apart: bool = False) -> Iterator[tuple[str, str]]:
    """Of all panels, or of those of prefill and decode apart."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            if ("tokenpipe_pd_" in target["expr"]) is apart:
                yield panel["title"], filled_in(target["expr"])


@pytest.mark.seconds(60)
async def test_every_panel_has_data(start_gateway: Start, upstream: RawUpstream, tmp_path: Path) -> None:
    config = {"breaker": {"failures": 10**6}, "health": {"fail": 10**6}, "balance": "round_robin", "retry": {"budget": 1.0}}
    upstream.script = answer
    left: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        dead = stack.enter_context(socket.socket())
        dead.bind(("127.0.0.1", 0))  # and does not listen: each request that comes here is tried elsewhere
        nobody = f"http://127.0.0.1:{dead.getsockname()[1]}"
        gateway = await start_gateway(config=config, backends=[upstream.url, nobody])
        database = await stack.enter_async_context(prometheus(gateway, tmp_path))
        deadline = time.monotonic() + 25
        for turn in range(100):
            await asyncio.gather(*(load(gateway, name) for name in (*SCRIPTS, "refused", "complete", "complete")))
            await asyncio.sleep(0.3)
            if turn < 6:
                continue
            left = [f"{title}: {expr}" for title, expr in targets() if not await database.query(expr) and "vllm:" not in expr]
            if not left or time.monotonic() > deadline:
                break
        assert not left, "\n".join(left)
        (up,) = await database.query("up")
        assert up["value"][1] == "1"
        groups = (await database.get("rules"))["groups"]
        assert {rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"} == set()
        exemplars = await database.get("query_exemplars", query="tokenpipe_time_to_first_token_seconds_bucket",
                                       start=str(time.time() - 60), end=str(time.time() + 5))  # fmt: skip
        assert {one["labels"]["trace_id"] for series in exemplars for one in series["exemplars"]} == {TRACE}
        for variable in DASHBOARD["templating"]["list"]:
            if variable["type"] == "query":
                series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
                values = await database.get(f"label/{quote(label)}/values", **{"match[]": filled_in(series)})
                assert {"instance": 1, "model": 2, "backend": 2}[variable["name"]] <= len(values)


DROPPED = s.event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop", "stop_reason": "recomputed"}]})


@pytest.mark.seconds(60)
async def test_every_panel_of_prefill_and_decode_has_data(start_gateway: Start, tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://pictures/a"}}
    bodies: dict[str, dict[str, Any]] = {
        "usual": s.CHAT,
        "encoded": {**s.CHAT, "messages": [{"role": "user", "content": [image]}]},
        "bypass": {**s.CHAT, "max_tokens": 1},
        "fallback": {**s.CHAT, "user": "fails"},
        "gone": {**s.CHAT, "user": "waits"},
        "dropped": {**s.CHAT, "user": "drops"},
    }
    async with contextlib.AsyncExitStack() as stack:
        (p,), (d,), ledger = await stack.enter_async_context(pairs.engines())
        encoder = RawUpstream(s.reply(200, {"choices": []}))
        await encoder.start()
        stack.push_async_callback(encoder.stop)
        prefill, quick, slow = pairs.prefill(ledger), pairs.decode(ledger), pairs.decode(ledger, seconds=0.2)

        drops = pairs.decode(ledger, s.stream(DROPPED, s.DONE))

        async def at_p(wire: HttpWire, request: Message) -> None:
            fails = request.json().get("user") == "fails"
            await (s.reply(500, b"{}") if fails else prefill)(wire, request)

        async def at_d(wire: HttpWire, request: Message) -> None:
            await {"waits": slow, "drops": drops}.get(request.json().get("user"), quick)(wire, request)

        p.script, d.script = at_p, at_d
        said = json.loads(pairs.config([p], [d], disaggregation={"local_decode_fallback": True, "recompute": "resume"}))
        said["backends"].append({"url": encoder.url, "role": "encode"})
        gateway = await start_gateway(config=json.dumps({**said, "breaker": {"failures": 10**6}}))
        database = await stack.enter_async_context(prometheus(gateway, tmp_path))

        async def one(name: str) -> None:
            client = await gateway.connect()
            await client.send(s.post(bodies[name]))
            if name == "gone":
                await asyncio.sleep(0.1)
                client.reset()
            else:
                assert (await client.read_response()).status == 200
                client.fin()

        left: list[str] = []
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline:
            await asyncio.gather(*map(one, bodies))
            await asyncio.sleep(0.3)
            left = [f"{title}: {expr}" for title, expr in targets(apart=True) if not await database.query(expr)]
            if not left:
                break
        assert not left, "\n".join(left)


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana asks of it: ids that are unique, panels beside one another, one data source by name of its variable."""
    assert DASHBOARD["uid"] == DASHBOARD["title"] == "tokenpipe"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert names | {"__rate_interval"} == used
