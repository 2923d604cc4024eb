"""deploy/examples is used: the configurations are checked by the programs that they are for, and streamed through."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from gateway.config import NOT_YET, Config, effective
from gateway.configbackends import BackendConfig
from tests.support.client import connected
from tests.support.gateway import Gateway, until
from tests.support.script import FINISHED, LAST, SSE_HEAD, Held, chunk, delta, post
from tests.support.upstream import RawUpstream, listening_socket

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "deploy" / "examples"
SOON = 1.0  # seconds: an event that is held back does not come at all
# a directory of its own for what nginx writes, so that the test needs no rights
KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
NGINX_TEMPORARY = "".join(f"    {kind}_temp_path {kind};\n" for kind in KINDS)


def tool(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def free_port() -> int:
    with listening_socket() as sock:
        port: int = sock.getsockname()[1]
        return port


class Front:
    """One of the examples, with its ports put in."""

    def __init__(self, name: str, folder: Path, gateway_port: int):
        self.port, self.folder = free_port(), folder
        text = (EXAMPLES / {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}[name]).read_text()
        ports = {r"(127\.0\.0\.1:)8000": gateway_port, r"(listen |bind :)8080": self.port}
        for before, port in ports.items():
            text, count = re.subn(before, rf"\g<1>{port}", text)
            assert count == 1, before
        program = tool(name)
        path = folder / name
        if name == "nginx":
            path.write_text(text.replace("http {\n", "http {\n    access_log off;\n" + NGINX_TEMPORARY, 1))
            said = f"daemon off; pid {folder}/pid; error_log {folder}/errors;"
            said += " user root;" if os.geteuid() == 0 else ""  # or its workers could not write there
            self.serve = [program, "-p", str(folder), "-c", str(path), "-e", str(folder / "errors"), "-g", said]
            self.check = [*self.serve, "-t"]
        else:
            path.write_text(text.replace("maxconn 20000", "maxconn 200"))  # the descriptors that a test has
            self.serve, self.check = [program, "-db", "-f", str(path)], [program, "-c", "-f", str(path)]


@pytest.fixture(params=["nginx", "haproxy"])
async def front(request: pytest.FixtureRequest, gateway: Gateway, tmp_path: Path) -> AsyncIterator[Front]:
    front = Front(request.param, tmp_path, gateway.port)
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(front.serve, stdout=output, stderr=output)
    try:
        await until(lambda: process.poll() is not None or accepts(front.port), "the front proxy to listen", 10)
        assert process.poll() is None, (tmp_path / "output").read_text()
        yield front
    finally:
        process.terminate()
        process.wait(10)


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_its_own_program_takes_it(name: str, tmp_path: Path) -> None:
    result = subprocess.run(Front(name, tmp_path, 8000).check, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not re.search(r"warn|alert", result.stdout + result.stderr, re.I), result.stdout + result.stderr


@pytest.mark.parametrize("name", ["tokenpipe.yaml", "discovery.yaml", "models.yaml"])
def test_the_gateway_takes_its_own(name: str) -> None:
    command = [sys.executable, "-m", "gateway", "check", "-c", str(EXAMPLES / name)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def keys(tree: object, path: str = "") -> list[str]:
    """Each key path of a tree of mappings, in its order; lists and empty mappings are values."""
    if not isinstance(tree, dict) or not tree:
        return [path]
    return [found for name, value in tree.items() for found in keys(value, f"{path}.{name}".lstrip("."))]


def test_it_has_every_key_in_order() -> None:
    """But those that do nothing yet. Of backends, the two that it has come to all of a backend's keys."""
    written = yaml.safe_load((EXAMPLES / "tokenpipe.yaml").read_text())
    assert keys(written) == [key for key in keys(effective(Config())) if key not in NOT_YET]
    shown = {name for backend in written["backends"] for name in backend}
    assert shown == set(BackendConfig.__struct_fields__)


async def test_each_event_comes_as_it_is_sent(front: Front, upstream: RawUpstream) -> None:
    upstream.script = held = Held(SSE_HEAD)
    async with connected(port=front.port) as client:
        await client.send(post())
        wire = await held.wire()
        for word in ("one", "two", "three"):
            await wire.send(chunk(delta(word)))
            await client.receive_until(word.encode(), SOON)
        await wire.send(b"".join(map(chunk, FINISHED)) + LAST)
        answer = await client.read_response()
        assert answer.complete
        assert answer.events()[-1] == "[DONE]"
        wire.fin()


async def test_a_client_that_leaves_reaches_the_engine(front: Front, upstream: RawUpstream) -> None:
    upstream.script = held = Held(SSE_HEAD, chunk(delta("one")))
    async with connected(port=front.port) as client:
        await client.send(post())
        await client.receive_until(b"one", SOON)
        client.reset()
        await (await held.wire()).wait_closed(SOON)


async def test_a_cut_stream_does_not_look_whole(front: Front, upstream: RawUpstream) -> None:
    upstream.script = held = Held(SSE_HEAD, chunk(delta("one")))
    async with connected(port=front.port) as client:
        await client.send(post())
        await client.receive_until(b"one", SOON)
        (await held.wire()).reset()
        answer = await client.read_response(timeout=SOON)
        assert not answer.complete


async def test_a_long_prompt_passes(front: Front, upstream: RawUpstream) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "long " * 1_000_000}]}
    async with connected(port=front.port) as client:
        assert (await client.ask(post(body))).status == 200
