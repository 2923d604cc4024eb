"""A backend's host that is gone while a request is on its way to it: nothing is acknowledged, and no end ever comes."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from gateway.core.outcome import Phase
from gateway.errors import UpstreamFailed
from gateway.net import sockets
from gateway.net.upstream import Connection, ConnectionPool, Origin, PoolSettings
from gateway.net.watch import NEVER, Timeouts, Watch
from tests.support.upstream import listening_socket

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: 2\r\n\r\n{}"
NO_NETWORK = 77  # the exit status where there can be no network of our own


def network(up: bool) -> None:
    """The whole network of this process: its loopback."""
    with socket.socket() as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP if up else 0))


class _Call:
    relay = None
    look_at = NEVER
    others = ()

    def __init__(self, connection: Connection):
        now = time.monotonic()
        self.waiting = connection
        self.exchange = types.SimpleNamespace(request_id="r", accepted=now, sent=now, phase=Phase.WAIT)
        self.policy = types.SimpleNamespace(timeouts=Timeouts(), step=0.2, comment=None)


async def wait(vanishes: bool) -> None:
    """For a head: the one that the backend sends late, or none."""
    listener = listening_socket()
    host, port = listener.getsockname()
    pool = ConnectionPool(Origin("m", host, port, None, b"m"), PoolSettings(), asyncio.get_running_loop())
    connection = await pool.open()
    theirs, _ = listener.accept()
    if vanishes:
        network(False)
    answer = connection.send(REQUEST, b"POST")
    call: Any = _Call(connection)
    live = {1: call}
    Watch(live, lambda *_: None).begin(call, call.exchange.sent)
    async with asyncio.timeout(20):
        if vanishes:
            with pytest.raises(UpstreamFailed, match="has acknowledged nothing for 1 s"):
                await answer
        else:
            await asyncio.sleep(2)  # an engine that thinks is another thing than one that is gone
            theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            assert (await answer).status == 200
    live.clear()
    connection.drop()
    theirs.close()
    listener.close()


def alone() -> None:
    """In a network of its own, where nobody else minds that it is cut."""
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(flags):
            sys.exit(NO_NETWORK)
        network(True)
    except (OSError, AttributeError):
        sys.exit(NO_NETWORK)
    sockets.VANISHED = 1.0
    asyncio.run(wait(False))
    asyncio.run(wait(True))


@pytest.mark.seconds(60)
def test_nothing_is_acknowledged() -> None:
    command = [sys.executable, "-c", "from tests.net.test_vanished import alone; alone()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    if done.returncode == NO_NETWORK:
        pytest.skip("no network namespace can be made here")
    assert done.returncode == 0, done.stderr
