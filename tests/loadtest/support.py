"""What several of the load tester's tests need: flags, clients, records by hand, the command as a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gateway.cli import cli
from gateway.core.outcome import Outcome
from gateway.loadtest.client import Client
from gateway.loadtest.endpoints import Asking, Kind
from gateway.loadtest.records import Record
from gateway.loadtest.settings import Settings, build
from gateway.loadtest.target import parse

ROOT = Path(__file__).resolve().parents[2]


def flags(*words: str) -> dict[str, Any]:
    """What the command line makes of its words."""
    command = cli.commands["loadtest"]
    # its parent's way of asking for help is inherited, and kept by the command
    with command.make_context("loadtest", list(words), parent=click.Context(cli, **cli.context_settings)) as context:
        return dict(context.params)


def settings(*words: str, key: str | None = None) -> Settings:
    return build(flags("http://127.0.0.1:1", *words), key)


def client(url: str, kind: Kind = Kind.CHAT, **options: Any) -> Client:
    return Client(parse("URL", url, kind.path), Asking(kind, "m"), (), **{"timeout": 20.0, **options})


def record(
    index: int = 0, *, started: float = 0.0, events: Sequence[float] = (), tokens: int | None = None,
    outcome: Outcome = Outcome.COMPLETE, **more: Any,
) -> Record:  # fmt: skip
    """One that was done; `events` are absolute, as in a record."""
    made = Record(index, started, prompt_len=10, arrived=started, started=started, outcome=outcome, choices=1)
    made.events = array("d", events)
    made.output_tokens = len(events) if tokens is None else tokens
    made.ended = events[-1] if events else started
    made.token_source, made.status = "usage", 200
    for name, value in more.items():
        setattr(made, name, value)
    return made


class Loadtest:
    """`tokenpipe loadtest` as a process; its output goes to files."""

    def __init__(self, folder: Path, *words: str, environment: dict[str, str] | None = None):
        self.folder = folder
        self._out, self._err = folder / "lt.out", folder / "lt.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "loadtest", *words], stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "", **(environment or {})},
            )  # fmt: skip

    async def done(self) -> int:
        """Its exit status."""
        try:
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        finally:
            self.process.kill()
        return self.process.wait()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()
