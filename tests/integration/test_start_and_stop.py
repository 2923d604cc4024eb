"""What a process leaves alone at its start and its end, and how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.gateway import Gateway
from tests.support.tls import Certificates

Start = Callable[..., Awaitable[Gateway]]
BACKEND = "backends: [{url: 'http://127.0.0.1:1'}]\nadmin: {listen: '127.0.0.1:0'}\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_file_that_stands_in_the_way_stays(tmp_path: Path) -> None:
    precious, config = tmp_path / "precious.txt", tmp_path / "c.yaml"
    precious.write_text("mine")
    config.write_text(f"listen: unix:{precious}\n{BACKEND}")
    done = run("serve", "-c", str(config))
    assert (done.returncode, precious.read_text()) == (1, "mine")
    assert "a file that is no socket stands there" in done.stderr


async def test_a_socket_of_another_process_stays(start_gateway: Start, tmp_path: Path) -> None:
    path, config = tmp_path / "s", tmp_path / "c.yaml"
    listen = ["127.0.0.1:0", f"unix:{path}"]
    await start_gateway(config={"listen": listen, "backends": [{"url": "http://127.0.0.1:1"}]}, ready=False)
    config.write_text(f"listen: unix:{path}\n{BACKEND}")
    done = await asyncio.to_thread(run, "serve", "-c", str(config))
    assert done.returncode == 1
    assert "another program listens there" in done.stderr
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize("key", ["tls.client_ca", "backends[0].tls.ca", "tls"])
def test_certificates_that_cannot_be_used(certificates: Certificates, tmp_path: Path, command: str, key: str) -> None:
    """Are named by key and file, with status 2, before anything is served."""
    config, junk = tmp_path / "c.yaml", tmp_path / "junk.pem"
    junk.write_text("no PEM")
    pair = f"certificate: '{certificates.certificate}', key: '{certificates.key}'"
    text = {
        "tls": f"tls: {{certificate: '{junk}', key: '{certificates.key}'}}\n{BACKEND}",
        "tls.client_ca": f"tls: {{{pair}, client_ca: '{junk}'}}\n{BACKEND}",
        "backends[0].tls.ca": f"backends: [{{url: 'https://127.0.0.1:1', tls: {{ca: '{junk}'}}}}]\n",
    }[key]
    config.write_text(text)
    done = run(command, "-c", str(config))
    assert done.returncode == 2
    assert f"{key}: found" in done.stderr
    assert str(junk) in done.stderr


async def test_a_stop_waits_for_no_handshake(start_gateway: Start, certificates: Certificates) -> None:
    """Clients that connect and are silent, without end, do not hold up a stop."""
    config = {
        "tls": {"certificate": str(certificates.certificate), "key": str(certificates.key)},
        "timeouts": {"drain": 1},
        "backends": [{"url": "http://127.0.0.1:1"}],
    }
    gateway = await start_gateway(config=config, ready=False)
    silent: list[socket.socket] = []

    def storm(ends: int) -> None:
        while len(silent) < ends:
            sock = socket.socket()
            silent.append(sock)
            with contextlib.suppress(OSError):
                sock.connect((gateway.host, gateway.port))

    try:
        storming = asyncio.create_task(asyncio.to_thread(storm, 400))
        await asyncio.sleep(0.05)
        gateway.signal(signal.SIGTERM)
        await gateway.stopped(timeout=20, tidy=False)  # handshakes end with the process
        await storming
    finally:
        for sock in silent:
            sock.close()
