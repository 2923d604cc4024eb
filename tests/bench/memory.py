"""What the gateway's memory is, and what a client costs that stops reading: `python -m tests.bench.memory`.

Resident memory of the gateway at 100 streams; then 1,000 clients ask for a stream without end and read nothing, beside
healthy ones, whose largest gap between two events is measured before and meanwhile. Exit status 1 if a bar is missed.
The kernel's own buffers are no part of a process's resident memory; they are bounded all the same (see deploy/behaviour.md),
and how much the gateway took in for one stalled client in all is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.gateway import Gateway
from tests.support.script import CHAT, SSE_HEAD, chunk, delta, get, post

AT_100 = 60 << 20  # octets: the bars
STALLED = 256 << 10
GAP = 0.02  # seconds between a healthy stream's events
PACE = 0.25  # seconds that a healthy stream may be late with an event, this process's own work included
HEALTHY = chunk(delta(" word"))
FLOOD = chunk(delta("x" * 4000)) * 4


class Engine(asyncio.Protocol):
    """Streams without end: an event each GAP, or where the request says so as fast as they are taken."""

    flooded: dict[Engine, int]

    def __init__(self) -> None:
        self.transport: Any = None
        self.received, self.paused, self.lost, self.flooding = b"", False, False, False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=1)  # so that what is in the kernel is all that has been taken

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.received.endswith((b"\r\n\r\n", b"}")):
            return
        request, self.received = self.received, b""
        if request.startswith(b"GET "):
            body = b'{"object":"list","data":[]}'
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            return
        self.transport.write(SSE_HEAD)
        self.flooding = b"flood" in request
        if self.flooding:
            Engine.flooded[self] = 0
            self.flood()
        else:
            self.beat()

    def beat(self) -> None:
        if not self.lost:
            self.transport.write(HEALTHY)
            asyncio.get_running_loop().call_later(GAP, self.beat)

    def flood(self) -> None:
        while not self.paused and not self.transport.is_closing():
            self.transport.write(FLOOD)
            Engine.flooded[self] += len(FLOOD)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.flooding:
            self.flood()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


class Reader(asyncio.Protocol):
    """A healthy client, which keeps the largest gap between two of its reads."""

    def __init__(self) -> None:
        self.last, self.worst, self.events, self.lost = 0.0, 0.0, 0, False

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self.last:
            self.worst = max(self.worst, now - self.last)
        self.last = now
        self.events += data.count(b"data: ")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


async def readers(gateway: Gateway, count: int) -> list[Reader]:
    loop, made = asyncio.get_running_loop(), []
    for _ in range(count):
        transport, reader = await loop.create_connection(Reader, gateway.host, gateway.port)
        transport.write(post())  # type: ignore[attr-defined]
        made.append(reader)
    return made


async def stalled(gateway: Gateway, count: int) -> list[socket.socket]:
    """Clients that send their request and never read; with the kernel's usual receive buffer."""
    loop, made = asyncio.get_running_loop(), []
    request = post({**CHAT, "user": "flood"})
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, (gateway.host, gateway.port))
        await loop.sock_sendall(sock, request)
        made.append(sock)
    return made


async def pace(healthy: list[Reader], seconds: float) -> tuple[float, float]:
    """The largest gap of any, and the median over streams of each one's largest."""
    for reader in healthy:
        reader.worst = 0.0
    await asyncio.sleep(seconds)
    assert not any(reader.lost for reader in healthy), "a healthy stream was cut"
    worst = [reader.worst for reader in healthy]
    return max(worst), statistics.median(worst)


async def settled(gateway: Gateway) -> int:
    """Resident octets, once they have stood still for a second."""
    before = 0
    for _ in range(60):
        now = gateway.rss()
        if abs(now - before) < 1 << 20:
            return now
        before = now
        await asyncio.sleep(1)
    return before


async def measure(options: argparse.Namespace, folder: Path) -> bool:
    Engine.flooded = {}
    listener = socket.socket()
    if options.send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.send_buffer)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.get_running_loop().create_server(Engine, sock=listener, backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = {"backends": [{"url": url}], "timeouts": {"client_write": 600}}
    gateway = await Gateway.start(folder, config=config)
    good = True

    def line(what: str, value: str, bar: str = "", well: bool = True) -> None:
        nonlocal good
        good = good and well
        print(f"{'ok  ' if well else 'FAIL'} {what:58} {value:>12}  {bar}")

    try:
        line("resident memory, idle", f"{gateway.rss() / (1 << 20):.1f} MiB")
        healthy = await readers(gateway, options.healthy)
        await asyncio.sleep(3)
        at_100 = await settled(gateway)
        well = at_100 <= AT_100
        line(f"resident memory at {options.healthy} streams", f"{at_100 / (1 << 20):.1f} MiB", "bar 60 MiB", well)
        worst, usual = await pace(healthy, options.seconds)
        what = f"largest gap between events sent each {GAP * 1e3:.0f} ms, alone"
        line(what, f"{worst * 1e3:.0f} ms", f"median stream {usual * 1e3:.0f} ms")

        before = await settled(gateway)
        idle = await stalled(gateway, options.stalled)
        worst, usual = await pace(healthy, options.seconds)
        line(f"the same, {options.stalled} stalled clients beside them", f"{worst * 1e3:.0f} ms",
             f"median stream {usual * 1e3:.0f} ms; bar {(GAP + PACE) * 1e3:.0f} ms", worst <= GAP + PACE)  # fmt: skip
        after = await settled(gateway)
        each = (after - before) / options.stalled
        line("resident memory for each stalled client", f"{each / 1024:.1f} KiB", "bar 256 KiB", each <= STALLED)
        held = await gateway.metric("tokenpipe_write_buffer_bytes") / options.stalled
        line("of that, held in its write buffer (metrics)", f"{held / 1024:.1f} KiB")
        taken = list(Engine.flooded.values())
        line("sent by its upstream in all, kernel buffers included", f"{max(taken) / 1024:.0f} KiB", "the most")
        paused = sum(stream["paused"] for stream in await streams(gateway))
        line("streams whose upstream is paused", str(paused), "", paused == options.stalled)
        for sock in idle:
            sock.close()
        await asyncio.sleep(3)
        line("resident memory once they have left", f"{await settled(gateway) / (1 << 20):.1f} MiB")
        left = len(await streams(gateway))
        line("streams left", str(left), "the healthy ones", left == options.healthy)
    finally:
        gateway.kill()
        server.close()
    print("memory: passed" if good else "memory: FAILED")
    return good


async def streams(gateway: Gateway) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await gateway.admin(get("/-/streams"))).json()
    return listed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--healthy", type=int, default=100, help="[100]")
    parser.add_argument("--stalled", type=int, default=1000, help="[1000]")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each look at the pace [5]")
    parser.add_argument("--send-buffer", type=int, default=0, metavar="OCTETS", help="of the engine's kernel; with 8192"
                        " little waits there, and what the gateway took is seen [the system's]")  # fmt: skip
    options = parser.parse_args()
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=factory) as runner:
        return 0 if runner.run(measure(options, Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
