"""A fleet with bad members under load: `python -m tests.bench.troubled [REQUESTS [RATE]]`.

Two engines that are well, and one each that is slow, that is killed and started again every other second, and that accepts
and never generates while its /health stays 200. The same load first meets the two that are well alone. What must hold is
printed, and decides the exit status: no error that another backend could have prevented, the load of the well ones within
10 % of each other, and TTFT p99 of what they served within 1.5 of the run without the others.

What an engine had in hand when it was killed is not to be prevented by another try: its stream was cut, or it may have read the
request, which is never sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.support.gateway import ROOT, Gateway
from tests.support.upstream import listening_socket

TOKENS = 8
UP, DOWN = 2.0, 1.0  # seconds that the flapping one is there, and away
KINDS = {"well-0": "0.05", "well-1": "0.05", "slow": "0.5", "flapping": "0.05", "hanging": "86400"}  # time to first token
CONFIG: dict[str, Any] = {
    "commit": "first_event",
    "timeouts": {"first_byte": 3, "connect": 1},
    "health": {"interval": 1, "timeout": 1, "silence": 1, "slow_start": 3},
    "retry": {"attempts": 3},
    "headers": {"receipt": True},
    "log": {"level": "warning", "access": True},
}


class Served(NamedTuple):
    status: int  # 0: cut
    backend: str
    ttft: float


class Mock:
    """A synthetic engine as a process on a port that stays."""

    def __init__(self, name: str, ttft: str):
        self.name, self._ttft = name, ttft
        with listening_socket() as sock:
            self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        flags = ("--port", str(self.port), "--ttft", self._ttft, "--itl", "0.01", "--tokens", str(TOKENS))
        quiet = asyncio.subprocess.DEVNULL
        command = (sys.executable, "-m", "gateway", "mock", *flags)
        self.process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=quiet, stderr=quiet)

    async def ready(self) -> None:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()

    async def flap(self) -> None:
        while True:
            await asyncio.sleep(UP)
            await self.kill()
            await asyncio.sleep(DOWN)
            await self.start()
            await self.ready()


@contextlib.asynccontextmanager
async def engines(names: tuple[str, ...]) -> AsyncIterator[list[Mock]]:
    mocks = [Mock(name, KINDS[name]) for name in names]
    flapping: list[asyncio.Task[None]] = []
    try:
        for mock in mocks:
            await mock.start()
        for mock in mocks:
            await mock.ready()
        flapping = [asyncio.create_task(mock.flap()) for mock in mocks if mock.name == "flapping"]
        yield mocks
    finally:
        for task in flapping:
            task.cancel()
        await asyncio.gather(*flapping, return_exceptions=True)
        for mock in mocks:
            await mock.kill()


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> Served:
    body = {"model": "synthetic", "stream": True, "max_tokens": TOKENS, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"question {number}"}]}  # fmt: skip
    began, ttft, received = time.monotonic(), 0.0, b""
    backend = ""
    try:
        async with session.post(url + "/v1/chat/completions", json=body) as answer:
            backend = answer.headers.get("X-Gateway-Backend", "")
            async for piece in answer.content.iter_any():
                ttft = ttft or time.monotonic() - began
                received += piece
            whole = answer.status != 200 or received.endswith(b"data: [DONE]\n\n")
            return Served(answer.status if whole else 0, backend, ttft)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return Served(0, backend, ttft)


async def load(names: tuple[str, ...], requests: int, rate: float, folder: Path) -> tuple[list[Served], dict[str, Any]]:
    """What became of each request; and the gateway's own figures afterwards."""
    async with engines(names) as mocks:
        listed = [{"url": mock.url, "name": mock.name} for mock in mocks]
        gateway = await Gateway.start(folder, config=CONFIG | {"backends": listed})
        try:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
                began, tasks = time.monotonic(), []
                for number in range(requests):
                    await asyncio.sleep(max(began + number / rate - time.monotonic(), 0))
                    tasks.append(asyncio.create_task(ask(session, gateway.url, number)))
                found = await asyncio.gather(*tasks)
            await gateway.idle(30)
            samples = await gateway.metrics()
            return found, {
                "in_flight": samples.value("tokenpipe_backend_in_flight"),
                "counted": samples.value("tokenpipe_requests_total"),
                "retries": samples.value("tokenpipe_retries_total"),
                "failures": samples.value("tokenpipe_backend_failures_total"),
                "log": gateway.access_log(),
            }
        finally:
            gateway.signal(signal.SIGTERM)
            await gateway.stopped()


def p99(found: list[Served]) -> float:
    times = sorted(one.ttft for one in found if one.status == 200 and one.backend.startswith("well"))
    return times[int(len(times) * 0.99)] if times else 0.0


def summary(found: list[Served], figures: dict[str, Any]) -> dict[str, Any]:
    shares = Counter(one.backend for one in found if one.status == 200)
    well = [shares["well-0"], shares["well-1"]]
    return {
        "statuses": dict(Counter(one.status for one in found)),
        "shares": dict(shares),
        "apart": round(abs(well[0] - well[1]) / max(*well, 1), 3),
        "ttft_p99_ms": round(p99(found) * 1000),
        "ttft_worst_ms": round(max(one.ttft for one in found) * 1000),
        "killed": sum(_killed(entry) for entry in figures["log"]),
        "failed": [
            {key: entry[key] for key in ("outcome", "code", "backend", "attempts", "phase")}
            for entry in figures["log"]
            if entry["outcome"] != "complete" and not _killed(entry)
        ],
        **{name: value for name, value in figures.items() if name != "log"},
    }


def _killed(entry: dict[str, Any]) -> bool:
    return entry["backend"] == "flapping" and entry["outcome"] == "upstream_reset"


async def main() -> int:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        alone = summary(*await load(("well-0", "well-1"), requests, rate, Path(one)))
        troubled = summary(*await load(tuple(KINDS), requests, rate, Path(other)))
    print(json.dumps({"alone": alone, "troubled": troubled}, indent=1))
    held = {
        "no error": not troubled["failed"] and troubled["statuses"].get(200, 0) + troubled["killed"] == requests,
        "the well ones' load within 10 %": troubled["apart"] <= 0.1,
        "TTFT p99 within 1.5": troubled["ttft_p99_ms"] <= 1.5 * alone["ttft_p99_ms"],
        "counters exact": troubled["counted"] == requests and troubled["in_flight"] == 0,
    }
    for what, so in held.items():
        print(f"{'holds' if so else 'DOES NOT HOLD'}: {what}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
