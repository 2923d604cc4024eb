"""What the checks of deploy/mock.md's rows have in common: `@sees(row)` says which row a check is for, a `Trial` runs it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gateway.synthetic.server import MockSettings, SyntheticUpstream
from tests.support.client import RawClient
from tests.support.messages import Message
from tests.synthetic.conftest import BODIES, CHAT, connect, request

PAGE = Path(__file__).resolve().parents[2] / "deploy" / "mock.md"
RECORDINGS = PAGE.parents[1] / "tests" / "vllm" / "recordings"
ROW = re.compile(r"^\| `([^`]+)`(?:, `([^`]+)`)? \|", re.M)

Check = Callable[["Trial"], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def rows() -> list[str]:
    """The first cells of the page's tables."""
    return [match[1] for match in ROW.finditer(PAGE.read_text())]


def sees(*asks: str) -> Callable[[Check], Check]:
    """The check is given what its row asks for as `trial.row`."""

    def register(check: Check) -> Check:
        for ask in asks:
            assert ask not in CHECKS, f"two checks for {ask}"
            CHECKS[ask] = check
        return check

    return register


class Trial:
    def __init__(self, row: str, folder: Path):
        self.row, self.folder = row, folder
        self.started: list[SyntheticUpstream] = []
        self.clients: list[RawClient] = []

    async def start(self, **settings: Any) -> SyntheticUpstream:
        """One that never waits, whose answers have five words and the end of the text."""
        mock = SyntheticUpstream(MockSettings(**{"port": 0, "ttft": 0, "itl": 0, "tokens": 6, **settings}))
        await mock.start()
        self.started.append(mock)
        return mock

    @property
    def mock(self) -> SyntheticUpstream:
        return self.started[0]

    async def stop(self) -> None:
        for client in self.clients:
            client.reset()
        for mock in self.started:
            await mock.stop()

    async def client(self, mock: SyntheticUpstream | None = None) -> RawClient:
        if not self.started:
            await self.start()
        client = await connect(mock or self.mock)
        self.clients.append(client)
        return client

    def bytes(self, ask: str | None = None, path: str = CHAT, fields: str = "", **changes: Any) -> bytes:
        """A streamed request that asks for what the row has, or for `ask`."""
        asked = self.row if ask is None else ask
        body = {**BODIES[path], "stream": True, **changes}
        for name in [name for name in body if name.startswith("max_") and name not in changes and path != "/v1/messages"]:
            del body[name]
        if path == "/v1/messages" and "max_tokens" not in changes:
            body["max_tokens"] = 1000
        if body["stream"] is None:
            del body["stream"]
        head = f"Content-Type: application/json\r\nx-synth: {asked}\r\n{fields}"
        return request("POST", path, body, head)

    async def send(self, ask: str | None = None, *, mock: SyntheticUpstream | None = None, **options: Any) -> RawClient:
        client = await self.client(mock)
        await client.send(self.bytes(ask, **options))
        return client

    async def ask(self, ask: str | None = None, *, mock: SyntheticUpstream | None = None, **options: Any) -> Message:
        client = await self.send(ask, mock=mock, **options)
        return await client.read_response()

    async def timed(self, ask: str | None = None, **options: Any) -> tuple[Message, list[float]]:
        """The answer, and when each HTTP chunk of it came after the request was sent."""
        client = await self.client()
        start = time.monotonic()
        await client.send(self.bytes(ask, **options))
        answer = await client.read_response()
        return answer, [at - start for at, _ in answer.chunks]

    async def get(self, path: str, method: str = "GET", body: Any = None, mock: SyntheticUpstream | None = None) -> Message:
        client = await self.client(mock)
        return await client.ask(request(method, path, body))

    async def log(self, index: int = 0) -> dict[str, Any]:
        """What the server itself says of a request, the latest first."""
        listed = (await self.get("/admin/synth/log")).json()["requests"]
        found: dict[str, Any] = (await self.get(f"/admin/synth/log/{listed[index]['id']}")).json()
        return found

    async def planned(self, index: int = 0) -> list[float]:
        """Seconds from a request to each write, as planned: what a loaded machine does not change."""
        entry = await self.log(index)
        for event in entry["events"]:
            assert event["sent_ns"] >= event["planned_ns"] - 2_000_000
        return [(event["planned_ns"] - entry["arrived_ns"]) / 1e9 for event in entry["events"]]

    async def faults(self, mock: SyntheticUpstream | None = None) -> dict[str, float]:
        """The faults that happened, by their counter."""
        text = (await self.get("/metrics", mock=mock)).body.decode()
        found = re.findall(r'^tokenpipe_mock_faults_injected_total\{fault="(\w+)"\} (\S+)$', text, re.M)
        return {name: float(value) for name, value in found if float(value)}

    async def until(self, true: Callable[[], object], within: float = 5.0) -> None:
        async with asyncio.timeout(within):
            while not true():
                await asyncio.sleep(0.002)


def chunks(answer: Message) -> list[dict[str, Any]]:
    """The events of a stream but [DONE], read."""
    return [json.loads(data) for data in answer.events() if data != "[DONE]"]


def contents(answer: Message) -> list[str]:
    """The text of each event that has a choice, the role chunk left out."""
    deltas = [choice["delta"] for chunk in chunks(answer) for choice in chunk["choices"]]
    return [delta["content"] for delta in deltas if "role" not in delta and delta.get("content") is not None]


def finishes(answer: Message) -> list[str]:
    """Every finish_reason that is there."""
    found = [choice["finish_reason"] for chunk in chunks(answer) for choice in chunk.get("choices", [])]
    return [reason for reason in found if reason]
