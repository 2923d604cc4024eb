"""What the load tester itself costs: processor time an event, and how late it is. `python -m tests.bench.loadtest_cost`.

A process of its own writes events on so many streams, each event in a write of its own, as vLLM does; the tester's client
runs in this one, and its processor time is counted. Figures to compare with those of another day on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import uvloop

from gateway.loadtest.client import Client
from gateway.loadtest.datasets import Prompt
from gateway.loadtest.endpoints import Asking, Kind
from gateway.loadtest.runner import Interrupt, Runner
from gateway.loadtest.statistics import check_tester, measure, success_rule
from gateway.loadtest.target import parse
from tests.support.script import DONE, FINISHED, LAST, SSE_HEAD, chunk, delta

TEXTS = (" token", " a", " longer", " word", ",", " of", " it")
FRAMES = tuple(chunk(delta(text)) for text in TEXTS)
TAIL = chunk(FINISHED[0]) + chunk(DONE) + LAST


class Stream(asyncio.Protocol):
    """Answers each request with `count` events, written by the beat of all streams."""

    running: ClassVar[set[Stream]] = set()
    count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.left, self.held = transport, 0, b""

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, blank, body = self.held.partition(b"\r\n\r\n")
        if not blank:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self.held, self.left = b"", self.count
            self.transport.write(SSE_HEAD)
            self.running.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.running.discard(self)

    def step(self) -> None:
        self.left -= 1
        if self.left:
            self.transport.write(FRAMES[self.left % len(FRAMES)])
        else:
            self.transport.write(TAIL)
            self.running.discard(self)


async def serve(events: int, gap: float) -> None:
    """Ten beats a gap, each for a tenth of the streams, so that events come spread over time."""
    Stream.count = events
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stream, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    began, beat = loop.time(), 0
    while True:
        beat += 1
        for stream in [each for place, each in enumerate(Stream.running) if place % 10 == beat % 10]:
            stream.step()
        await asyncio.sleep(began + beat * gap / 10 - loop.time())


async def load(port: int, streams: int, requests: int) -> None:
    target = parse("URL", f"http://127.0.0.1:{port}", Kind.CHAT.path)
    client = Client(target, Asking(Kind.CHAT, "m"), (), timeout=600.0)
    runner = Runner([client], streams, Interrupt())
    run = await runner.run([[Prompt("hi", 1, None)] * requests], [[0.0] * requests], float("inf"))
    client.close()
    metrics = measure(run.records[0], run.duration, success_rule("strict", Kind.CHAT))
    check = check_tester(run)
    print(f"{metrics.completed} requests completed, {metrics.failed} failed, {metrics.events} events in {run.duration:.1f} s")
    print(f"processor time an event:  {run.watch.cpu_seconds / max(metrics.events, 1) * 1e6:.1f} microseconds")
    print(f"events a second:          {check.events_per_second:.0f}, with {check.cpu:.0%} of one core")
    lags = ", ".join(f"{value * 1e3:.2f}" for _, value in check.loop_lag.percentiles)
    print(f"event loop lag:           {lags} ms (p50, p99, max)")
    for doubt in check.doubts:
        print(f"in doubt: {doubt}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200, help="at once [200]")
    parser.add_argument("--requests", type=int, default=400, help="in all [400]")
    parser.add_argument("--events", type=int, default=250, help="a stream [250]")
    parser.add_argument("--rate", type=float, default=50.0, help="events a second and stream [50]")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        uvloop.run(serve(given.events, 1 / given.rate))
        return
    command = [sys.executable, "-m", "tests.bench.loadtest_cost", "--serve", "--events", str(given.events)]
    root = Path(__file__).resolve().parents[2]
    upstream = subprocess.Popen([*command, "--rate", str(given.rate)], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert upstream.stdout is not None
        port = int(upstream.stdout.readline())
        time.sleep(0.2)
        uvloop.run(load(port, given.streams, given.requests))
    finally:
        upstream.kill()
        upstream.wait()


if __name__ == "__main__":
    main()
