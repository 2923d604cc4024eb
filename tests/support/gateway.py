"""The real gateway, as the process that an operator starts.

Its output goes to files, so that no task and no thread of the test's has to read it. It takes free ports itself, and
they are learnt from the line that says where it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support import warm
from tests.support.client import RawClient
from tests.support.messages import Message
from tests.support.script import get
from tests.support.wire import ORDINARY

ROOT = Path(__file__).resolve().parents[2]
LISTENING = re.compile(r"listening on (https?)://(\S+):(\d+).*?, admin on https?://(\S+):(\d+)")
# what no run may write: an exception that nobody took care of, or something that nobody closed
UNTIDY = re.compile(
    r"Traceback|was never retrieved|was destroyed but it is pending|was never awaited|ResourceWarning|unclosed"
)


class Samples(list[tuple[str, dict[str, str], float]]):
    """The samples of one scrape."""

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples called `name` that have these labels; 0 where there is none."""
        return sum(v for n, have, v in self if n == name and labels.items() <= have.items())

    def has(self, name: str, **labels: str) -> bool:
        return any(n == name and labels.items() <= have.items() for n, have, _ in self)


def _limit(descriptors: int | None) -> None:
    """The hard limit, too: a soft one is raised by the gateway as far as it may be."""
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


class Gateway:
    patience = ORDINARY  # seconds for an answer, where nobody says another number: more where the machine is busy elsewhere

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, config_path: Path | None) -> None:
        self.process, self.folder, self.config_path = process, folder, config_path
        self.scheme, self.host, self.port = "http", "127.0.0.1", 0
        self.admin_host, self.admin_port = "127.0.0.1", 0
        self._checked = 0  # how much of standard error has been looked at

    def __repr__(self) -> str:
        return f"<Gateway pid={self.pid} port={self.port} admin={self.admin_port} status={self.process.poll()}>"

    @classmethod
    async def start(
        cls, folder: Path, *, config: dict[str, Any] | str | None = None, flags: Sequence[str] = (),
        backends: Sequence[str] = (), environment: dict[str, str] | None = None, ready: bool = True,
        timeout: float = 20.0, descriptors: int | None = None,
    ) -> Gateway:  # fmt: skip
        """`folder` takes its output and its configuration. `ready`: wait until it would route, too.
        `descriptors`: as many as it may ever have.

        `config` is written as YAML, with `backends` added unless it names its own; without one, flags say it all.
        Access log lines are JSON, and the ports free ones, unless `config` or `flags` have their own.
        """
        config_path, arguments = None, ["serve"]
        if config is not None:
            config_path = folder / "tokenpipe.yaml"
            if isinstance(config, dict):
                named = {} if "backends" in config or not backends else {"backends": [{"url": u} for u in backends]}
                config = json.dumps({**named, **config}, indent=1)  # JSON is YAML
            config_path.write_text(config)
            arguments += ["-c", str(config_path)]
        else:
            arguments += [word for url in backends for word in ("--backend", url)]
        text = config or ""
        if not re.search(r'^\s*"?listen"?:', text, re.M) and "--port" not in flags:
            arguments += ["--port", "0"]
        if not re.search(r'"?admin"?:[^}]*"?listen"?:', text) and "--admin-port" not in flags:
            arguments += ["--admin-port", "0"]
        if "--log-format" not in flags and not re.search(r'"?format"?:', text):
            arguments += ["--log-format", "json"]
        arguments += flags
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            if environment is None and descriptors is None:
                process: subprocess.Popen[bytes] = warm.start(arguments, out, err)
            else:
                process = subprocess.Popen(
                    [sys.executable, "-m", "gateway", *arguments], stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                    cwd=ROOT, start_new_session=True, env={**os.environ, **warm.ENVIRONMENT, **(environment or {})},
                    preexec_fn=lambda: _limit(descriptors),
                )  # fmt: skip
        gateway = cls(process, folder, config_path)
        try:
            await gateway._wait_listening(timeout)
            if ready and (backends or "backends" in text):
                await gateway._wait_ready(timeout)
        except BaseException:
            gateway.kill()
            raise
        return gateway

    async def _wait_listening(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            while not (match := LISTENING.search(self.stderr())):
                assert self.process.poll() is None, f"exited {self.process.returncode}: {self.stderr()[-3000:]}"
                await asyncio.sleep(0.02)
        self.scheme, self.host, self.port = match[1], match[2].strip("[]"), int(match[3])
        self.admin_host, self.admin_port = match[4].strip("[]"), int(match[5])

    async def _wait_ready(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            while (await self.admin(get("/readyz"))).status != 200:
                await asyncio.sleep(0.02)

    # --- talking to it

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    async def connect(self, **options: Any) -> RawClient:
        return await RawClient.connect(self.host, self.port, **options)

    async def ask(self, request: bytes | None = None, *, timeout: float | None = None) -> Message:
        """One request on a connection of its own."""
        client = await self.connect()
        try:
            return await client.ask(request, timeout=timeout or self.patience)
        finally:
            client.fin()

    async def admin(self, request: bytes, *, timeout: float | None = None) -> Message:
        client = await RawClient.connect(self.admin_host, self.admin_port)
        try:
            return await client.ask(request, timeout=timeout or self.patience)
        finally:
            client.fin()

    async def metrics(self) -> Samples:
        answer = await self.admin(get("/metrics"))
        assert answer.status == 200, answer.start
        families = text_string_to_metric_families(answer.body.decode())
        return Samples((s.name, s.labels, s.value) for family in families for s in family.samples)

    async def metric(self, name: str, **labels: str) -> float:
        return (await self.metrics()).value(name, **labels)

    async def idle(self, timeout: float | None = None) -> None:
        """Wait until nothing is in flight."""
        async with asyncio.timeout(timeout or self.patience):
            while await self.metric("tokenpipe_requests_in_flight"):
                await asyncio.sleep(0.02)

    # --- what it wrote

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def lines(self) -> list[str]:
        """All that it wrote, standard output first."""
        return [*(self.folder / "stdout").read_text(errors="replace").splitlines(), *self.stderr().splitlines()]

    def access_log(self, **wanted: Any) -> list[dict[str, Any]]:
        """The entries of the access log that have these values."""
        entries = []
        for line in self.lines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and {"request_id", "outcome"} <= entry.keys():
                    entries.append(entry)
        return [e for e in entries if all(e.get(key) == value for key, value in wanted.items())]

    async def logged(self, count: int = 1, *, timeout: float = ORDINARY, **wanted: Any) -> list[dict[str, Any]]:
        """Wait for that many entries with these values, for instance `request_id`."""
        await until(lambda: len(self.access_log(**wanted)) >= count, f"{count} log entries {wanted}", timeout)
        return self.access_log(**wanted)

    def check_tidy(self) -> None:
        """Nothing untidy on standard error since the last look."""
        text = self.stderr()
        new, self._checked = text[self._checked :], len(text)
        match = UNTIDY.search(new)
        if match is not None:
            around = new[max(0, match.start() - 1000) : match.end() + 5000]
            raise AssertionError(f"{match[0]!r} on standard error:\n{around}")

    # --- the process

    def tree(self) -> list[int]:
        """Its process id and those of its descendants."""
        return list(_tree(self.pid))

    def rss(self) -> int:
        """Resident bytes of the process tree."""
        total = 0
        for pid in self.tree():
            with contextlib.suppress(OSError, AttributeError):
                total += int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
        return total * 1024

    def fds(self) -> int:
        """Open file descriptors of the process tree."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.tree())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, *, status: int = 0, timeout: float = 15.0, tidy: bool = True) -> None:
        """SIGTERM, and it must end so, soon and tidily. Blocks: for teardown, when nothing is in flight."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running {timeout:g} s after SIGTERM:\n{self.stderr()[-3000:]}") from None
        self._check_end(status, tidy)

    async def stopped(self, *, status: int = 0, timeout: float = 15.0, tidy: bool = True) -> float:
        """Wait, without blocking the test's loop, until it has ended so; returns when that was."""
        await until(lambda: self.process.poll() is not None, "the gateway's end", timeout)
        ended = time.monotonic()
        self._check_end(status, tidy)
        return ended

    def _check_end(self, status: int, tidy: bool) -> None:
        got = self.process.returncode
        assert got == status, f"exit status {got}, not {status}:\n{self.stderr()[-3000:]}"
        if tidy:
            self.check_tidy()

    def kill(self) -> None:
        """With all its workers, whatever state they are in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _tree(int(child))


@contextlib.contextmanager
def no_descriptor_left(gateway: Gateway, spare: int = 0) -> Iterator[None]:
    """For the time of a `with` it can open only so many."""
    taken = {int(name) for name in os.listdir(f"/proc/{gateway.pid}/fd")}
    free = (number for number in range(1_000_000) if number not in taken)
    most = next(number for at, number in enumerate(free) if at == spare)
    before = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, before)


async def until(condition: Callable[[], object], what: str, timeout: float = ORDINARY) -> None:
    """Wait for what the test cannot be told of, only look at."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        await asyncio.sleep(0.01)
