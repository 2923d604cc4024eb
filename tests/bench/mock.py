"""What the synthetic engine can do: `python -m tests.bench.mock`.

At a pace: so many streams of so many events a second; processor time an event, and how late events left, by the engine's
own log of planned and actual moments. Then at full speed: how many events a second one process gives. Exit status 1 if a
bar is missed; on a machine that does something else besides, lateness is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from typing import Any

import uvloop

from tests.support.gateway import ROOT

EVENTS_PER_SECOND = 10_000  # the bars
LATE_P99 = 0.001


class Reader(asyncio.Protocol):
    """Asks for a stream without end, and counts its events."""

    events = 0

    def __init__(self, ask: str) -> None:
        self.ask = ask

    def connection_made(self, transport: Any) -> None:
        message = {"role": "user", "content": "hi"}
        body = json.dumps({"messages": [message], "stream": True, "ignore_eos": True, "max_tokens": 1_000_000}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: mock\r\nContent-Type: application/json\r\n"
        transport.write(f"{head}x-synth: {self.ask}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        Reader.events += data.count(b"data: ")


def processor(pid: int) -> float:
    """Seconds of processor time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path) as answer:
        return json.load(answer)


def lateness(url: str) -> list[float]:
    """Seconds from when an event was to leave to when it had, in order: of all but what fell into the first second, when
    the streams begin all at once."""
    late = []
    for entry in page(url, "/admin/synth/log")["requests"]:
        events = page(url, f"/admin/synth/log/{entry['id']}")["events"]
        steady = [event for event in events if event["planned_ns"] > entry["arrived_ns"] + 1e9]
        late += [(event["sent_ns"] - event["planned_ns"]) / 1e9 for event in steady]
    return sorted(late)


async def load(url: str, pid: int, streams: int, seconds: float, ask: str) -> tuple[float, float]:
    """Events a second, and processor time an event."""
    loop, port = asyncio.get_running_loop(), int(url.rpartition(":")[2])
    transports = [(await loop.create_connection(lambda: Reader(ask), "127.0.0.1", port))[0] for _ in range(streams)]
    await asyncio.sleep(1)
    used, events, began = processor(pid), Reader.events, loop.time()
    await asyncio.sleep(seconds)
    used, events, took = processor(pid) - used, Reader.events - events, loop.time() - began
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0.2)
    return events / took, used / max(1, events)


async def measure(url: str, pid: int, streams: int, rate: float, seconds: float) -> bool:
    pace, cost = await load(url, pid, streams, seconds, f"ttft=uniform:0:{1 / rate};itl={1 / rate}")
    late = lateness(url)
    p50, p99, most = (late[int(len(late) * share)] * 1000 for share in (0.5, 0.99, 0.9999))
    print(f"{streams} streams x {rate:g} events/s: {pace:.0f} events/s, {cost * 1e6:.1f} us of processor time an event")
    print(f"late by, ms: p50 {p50:.3f}, p99 {p99:.3f}, p99.99 {most:.3f} ({len(late)} events)")
    full, cost = await load(url, pid, 16, seconds, "ttft=0;itl=0")
    print(f"at full speed, 16 streams: {full:.0f} events/s, {cost * 1e6:.1f} us an event")
    return full >= EVENTS_PER_SECOND and p99 <= LATE_P99 * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=8)
    options = parser.parse_args()
    command = [sys.executable, "-m", "gateway", "mock", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = re.search(r"http://\S+", process.stderr.readline())
            assert found is not None
            job = measure(found[0], process.pid, options.streams, options.rate, options.seconds)
            met = uvloop.run(job)
        finally:
            process.terminate()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
