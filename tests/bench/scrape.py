"""What a scrape of the largest set of series costs the streams beside it: `python -m tests.bench.scrape`.

512 pairs of a model and a backend are filled, each with streams that end in several ways; then one stream is measured
while nobody scrapes, and while somebody does without a pause: from the backend's write to the client's read. Exit status
1 if scraping adds more than 5 ms at the 99th percentile. `--streams` more are under way meanwhile, silent ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support import script as s
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

MODELS, BACKENDS = 64, 8
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
ADDED_MOST = 0.005  # seconds: the bar
GAP = 0.004  # seconds between the events of the measured stream
USAGE = s.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}})
ENDINGS = [
    s.stream(s.delta("a"), s.delta("b"), USAGE, *s.FINISHED, gap=0.001),
    s.reply(500, b"{}"),
    s.stream(s.delta("a"), s.event({"error": {"message": "x", "code": 500}}), s.DONE),
]


async def answer(wire: HttpWire, request: Message) -> None:
    kind, _, number = (request.get("x-request-id") or "").partition(".")
    if kind == "hold":
        await wire.send(s.SSE_HEAD + s.chunk(s.delta("a")))
        await wire.wait_closed(600)
    elif kind == "paced":
        await wire.send(s.SSE_HEAD)
        for _ in range(int(number)):
            await asyncio.sleep(GAP)
            await wire.send(s.chunk(s.delta(f"{time.monotonic():020.6f}")))
        await wire.send(b"".join(map(s.chunk, s.FINISHED)) + s.LAST)
    else:
        await ENDINGS[int(number)](wire, request)


def ask(request_id: str, model: str) -> bytes:
    return s.post({**s.CHAT, "model": model}, fields=[("X-Request-Id", request_id)])


async def measure(gateway: Gateway, events: int) -> list[float]:
    """Seconds that each event was on its way, sorted."""
    client = await gateway.connect()
    await client.send(ask(f"paced.{events}", "m0"))
    ways, data = [], b""
    while b"[DONE]" not in data:
        data = data[-400:] + await client.receive(timeout=10)
        now = time.monotonic()
        *_, last = data.rpartition(b'"content":"')
        with contextlib.suppress(ValueError):
            ways.append(now - float(last[:20]))
    client.fin()
    return sorted(ways)


@contextlib.asynccontextmanager
async def scraping(gateway: Gateway, seen: list[str]) -> AsyncIterator[None]:
    """One scrape after the other, in a process of their own. `seen`: octets and seconds of each."""
    url = f"http://{gateway.admin_host}:{gateway.admin_port}/metrics"
    once = f"curl -sS -o /dev/null -w '%{{size_download}} %{{time_total}}\n' -H 'Accept: {OPENMETRICS}' {url}"
    shell = await asyncio.create_subprocess_shell(f"while {once}; do :; done", stdout=asyncio.subprocess.PIPE)
    assert shell.stdout is not None
    await shell.stdout.readline()
    yield
    shell.terminate()
    out, _ = await shell.communicate()
    seen.extend(out.decode().split("\n")[:-1])


def show(name: str, ways: list[float]) -> float:
    p50, p99 = (ways[int(len(ways) * share)] for share in (0.5, 0.99))
    print(f"{name:24} {len(ways)} events: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, most {ways[-1] * 1e3:.2f} ms")
    return p99


async def run(folder: Path, events: int, streams: int) -> bool:
    names = [f"m{number}" for number in range(MODELS)]
    upstreams = [RawUpstream(answer, models=names) for _ in range(BACKENDS)]
    for each in upstreams:
        await each.start()
    gateway = await Gateway.start(
        folder, config={"log": {"access": False}, "breaker": {"failures": 10**6}}, backends=[u.url for u in upstreams]
    )
    while {len(b["models"]) for b in (await gateway.admin(s.get("/-/backends"))).json()} != {MODELS}:
        await asyncio.sleep(0.1)
    for name in names:
        for number in range(len(ENDINGS)):
            await asyncio.gather(*(gateway.ask(ask(f"end.{number}", name)) for _ in range(2 * BACKENDS)))
    held = [await gateway.connect() for _ in range(streams)]
    for number, client in enumerate(held):
        await client.send(ask(f"hold.{number}", names[number % MODELS]))
    while await gateway.metric("tokenpipe_requests_in_flight", phase="stream") < streams:
        await asyncio.sleep(0.1)
    gc.disable()  # what this process does is in the figures, too
    before = show("nobody scrapes", await measure(gateway, events))
    seen: list[str] = []
    async with scraping(gateway, seen):
        after = show("scraped without a pause", await measure(gateway, events))
    octets, seconds = zip(*(map(float, line.split()) for line in seen), strict=True)
    lines = (await gateway.admin(s.get("/metrics"), timeout=60)).body.count(b"\n")
    print(f"{len(seen)} scrapes of {lines} lines, {octets[0] / 1e6:.1f} MB: {min(seconds):.2f} to {max(seconds):.2f} s each")
    print(f"added at p99: {(after - before) * 1e3:.2f} ms (bar {ADDED_MOST * 1e3:g})")
    for client in held:
        client.fin()
    gateway.kill()
    for each in upstreams:
        await each.stop(check=False)
    return after - before <= ADDED_MOST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if asyncio.run(run(Path(folder), options.events, options.streams)) else 1


if __name__ == "__main__":
    sys.exit(main())
