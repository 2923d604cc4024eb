"""What a prefill leg costs beside a whole plain request: processor time of the gateway. `python -m tests.bench.disagg_cost`.

Two gateways in front of the same engines, one with a backend, one with a pair (NIXL). They are asked in turn for streams of one
token, so that a machine that drifts touches both alike: from one connection, and from several at once. The ratio counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support import script as s
from tests.support.gateway import Gateway

HANDED = dict.fromkeys(("remote_engine_id", "remote_request_id", "remote_host"), "x")
PREFILLED = {
    "id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    "kv_transfer_params": {"do_remote_prefill": True, "remote_port": 5600, "remote_block_ids": [[1]], **HANDED},
}  # fmt: skip
STREAM = s.SSE_HEAD + s.chunk(s.delta("x")) + s.chunk(s.FINISHED[0]) + s.chunk(s.DONE) + s.LAST


def whole(answer: object) -> bytes:
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Engine(asyncio.Protocol):
    """Answers at once: a stream of one token, what a prefill engine says, or which model there is."""

    models = whole({"object": "list", "data": [{"id": "m", "object": "model"}]})
    prefilled = whole(PREFILLED)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.held = transport, b""

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, blank, body = self.held.partition(b"\r\n\r\n")
        length = int((head.lower() + b"\r\n").partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if blank and len(body) >= length:
            self.held = b""
            asked = STREAM if b'"stream": true' in body else self.prefilled
            self.transport.write(self.models if head.startswith(b"GET") else asked)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0) for _ in range(2)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await loop.create_future()


def ask(gateway: Gateway, count: int, connections: int) -> None:
    """`count` requests on each of them, one after the other."""
    request, selector = s.post(), selectors.DefaultSelector()
    for _ in range(connections):
        client = socket.create_connection((gateway.host, gateway.port))
        client.sendall(request)
        selector.register(client, selectors.EVENT_READ, [count])  # to be answered
    while selector.get_map():
        for key, _ in selector.select():
            client, left = key.fileobj, key.data
            assert isinstance(client, socket.socket)
            piece = client.recv(1 << 16)
            assert piece
            if not piece.endswith(s.LAST):
                continue
            left[0] -= 1
            if left[0]:
                client.sendall(request)
            else:
                selector.unregister(client)
                client.close()


def used(gateway: Gateway) -> float:
    """Microseconds of processor time, user's and system's, of all threads. What /proc/PID/stat says goes by ticks of 10 ms."""
    return sum(int(thread.read_text().split()[0]) for thread in Path(f"/proc/{gateway.pid}/task").glob("*/schedstat")) / 1e3


async def compare(count: int, rounds: int, connections: Sequence[int]) -> None:
    engines = subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve"], stdout=subprocess.PIPE, text=True)
    assert engines.stdout is not None
    first, second = (f"http://127.0.0.1:{port}" for port in engines.stdout.readline().split())
    quiet = {"log": {"access": False}}
    pair = [{"url": first, "role": "prefill"}, {"url": second, "role": "decode"}]
    configs = {
        "plain": {**quiet, "backends": [{"url": first}]},
        "a pair": {**quiet, "backends": pair, "disaggregation": {"connector": "nixl"}},
    }
    gateways: dict[str, Gateway] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, config in configs.items():
                (own := Path(folder, name)).mkdir()
                gateways[name] = await Gateway.start(own, config=config)
                ask(gateways[name], 300, 1)
            for several in connections:
                found: dict[str, list[float]] = {name: [] for name in gateways}
                for _ in range(rounds):
                    for name, gateway in gateways.items():
                        before = used(gateway)
                        ask(gateway, count // several, several)
                        found[name].append((used(gateway) - before) / (count // several * several))
                plain, both = (statistics.median(values) for values in found.values())
                print(f"{several} at once: plain {plain:.0f} microseconds a request, a pair {both:.0f}: ", end="")
                print(f"a prefill leg adds {(both - plain) / plain:.2f} times a plain request")
            for gateway in gateways.values():
                gateway.stop()
    finally:
        engines.kill()
        engines.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(serve() if given.serve else compare(given.requests, given.rounds, given.connections))
