"""deploy/examples/disaggregated is used: each file is checked, and the commands in its comment are run as they stand there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.configdisagg import Connector
from tests.support.client import RawClient
from tests.support.gateway import ROOT, until
from tests.support.script import get, post
from tests.support.upstream import listening_socket

EXAMPLES = ROOT / "deploy" / "examples" / "disaggregated"
PORTS = ("8000", "8010", "8100", "8200", "9400")
COMMAND = re.compile(r"^#   \$ tokenpipe (.*)$", re.M)
# one for each order in which the two engines are asked; the flows of all are in test_connectors.py
TRIED = ("nixl", "mooncake", "layerwise")


def test_each_connector_has_one() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == {*Connector.__args__} - {"sidecar"} | {"encoders"}


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES.glob("*.yaml")])
def test_accepted(name: str) -> None:
    path = EXAMPLES / f"{name}.yaml"
    done = subprocess.run([sys.executable, "-m", "gateway", "check", "-c", str(path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    connector = "nixl" if name == "encoders" else name
    assert f"connector: {connector}\n" in text and ("serve MODEL" in text or "--model-path MODEL" in text)
    assert len(COMMAND.findall(text)) == (4 if name == "encoders" else 3)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(listening_socket()).getsockname()[1] for _ in range(count)]


@contextlib.contextmanager
def tried_out(name: str, folder: Path) -> Iterator[dict[str, int]]:
    """The example's three commands, with free ports for those it has; the new port by the old one."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    pattern, text = r"(?<![.\d])(?:" + "|".join(PORTS) + r")\b", (EXAMPLES / f"{name}.yaml").read_text()
    text = re.sub(pattern, lambda found: str(ports[found[0]]), text)
    (folder / f"{name}.yaml").write_text(text)
    started = []
    try:
        for at, command in enumerate(COMMAND.findall(text)):
            words = shlex.split(command.replace("deploy/examples/disaggregated", str(folder)))
            with open(folder / f"{at}.log", "wb") as log:
                arguments = [sys.executable, "-m", "gateway", *words]
                started.append(subprocess.Popen(arguments, cwd=ROOT, env=os.environ, stdout=log, stderr=log))
        yield ports
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(10)


@pytest.mark.parametrize("name", TRIED)
async def test_tried_out(name: str, tmp_path: Path) -> None:
    with tried_out(name, tmp_path) as ports:
        logs = [tmp_path / f"{at}.log" for at in range(3)]
        await until(lambda: all("listening on" in log.read_text() for log in logs), "three listeners", 20)

        async def ready() -> bool:
            client = await RawClient.connect(port=ports["9400"])
            answer = await client.ask(get("/readyz"))
            client.fin()
            return answer.status == 200

        while not await ready():
            pass
        client = await RawClient.connect(port=ports["8000"])
        body = {"model": "synthetic", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        answer = await client.ask(post(json.dumps(body).encode()))
        client.fin()
        assert answer.status == 200 and answer.events()[-1] == "[DONE]", (answer.body, logs[2].read_text())
        watched = await RawClient.connect(port=ports["8200" if name == "layerwise" else "8100"])
        state = (await watched.ask(get("/admin/synth/kv"))).json()
        watched.fin()
        assert (state["held"], state["ends"]["pulled"]) == ([], 1)
