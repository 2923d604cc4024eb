"""deploy/examples/disaggregated is used: each file is checked, and the commands in its comment are run as they stand there."""

from __future__ import annotations

import contextlib
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
from tests.support.messages import Message
from tests.support.script import get, post
from tests.support.upstream import listening_socket

EXAMPLES = ROOT / "deploy" / "examples" / "disaggregated"
PORTS = ("8000", "8010", "8100", "8200", "8300", "9400")
COMMAND = re.compile(r"^#   \$ tokenpipe (.*)$", re.M)
BODY = re.compile(r"^#       -d '(.*?)'$", re.M | re.S)
LEDGER = re.compile(r"^#   \$ curl http://127.0.0.1:(\d+)/admin/synth/kv ", re.M)
# one for each order in which the engines are asked; the flows of all are in test_connectors.py
TRIED = ("nixl", "mooncake", "layerwise", "shared_storage", "encoders")


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
    text = (EXAMPLES / f"{name}.yaml").read_text()
    (body,), (ledger,) = BODY.findall(text), LEDGER.findall(text)
    with tried_out(name, tmp_path) as ports:
        logs = list(tmp_path.glob("*.log"))
        assert len(logs) == len(COMMAND.findall(text))
        await until(lambda: all("listening on" in log.read_text() for log in logs), "all to listen", 20)

        async def told(port: str, path: str) -> Message:
            client = await RawClient.connect(port=ports[port])
            answer = await client.ask(get(path))
            client.fin()
            return answer

        while (await told("9400", "/readyz")).status != 200:
            pass
        client = await RawClient.connect(port=ports["8000"])
        answer = await client.ask(post(body.replace("\n#", "\n").encode()))
        client.fin()
        assert answer.status == 200 and answer.events()[-1] == "[DONE]", (answer.body, [log.read_text() for log in logs])
        state = (await told(ledger, "/admin/synth/kv")).json()
        assert (state["held"], state["loaded" if name == "shared_storage" else "ends"]) == (
            [], 1 if name == "shared_storage" else {"pulled": 1, "rejected": 0, "expired": 0, "aborted": 0}
        )  # fmt: skip
        if name == "encoders":
            assert [one["ended"] for one in (await told("8300", "/admin/synth/log")).json()["requests"]] == ["complete"]
