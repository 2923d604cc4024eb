"""Standard error whose reader does not keep up, stops, or is gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.telemetry.outlet import KEPT_MOST, Outlet
from tests.support import script as s
from tests.support.client import RawClient

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


def line(number: int) -> str:
    return f"{number:06d} {'x' * 92}\n"


def test_a_reader_that_comes_later_gets_all(pipe: Pipe) -> None:
    """More than the pipe takes is kept, in order, and tried again later; only one look is planned at a time."""
    planned: list[Callable[[], None]] = []
    outlet = Outlet(pipe[1])
    outlet.later = planned.append
    for number in range(3000):
        outlet.write(line(number))
        outlet.flush()
    assert len(planned) == 1
    got = b""
    while planned:
        got += os.read(pipe[0], 1 << 20)
        planned.pop()()
    got += os.read(pipe[0], 1 << 20)
    assert got.decode() == "".join(map(line, range(3000)))


def test_what_is_lost_is_told_of(pipe: Pipe) -> None:
    outlet = Outlet(pipe[1])
    most = 2 * KEPT_MOST // 100
    for number in range(most):
        outlet.write(line(number))
    got = b""
    while b"lost" not in got:
        outlet.flush()
        got += os.read(pipe[0], 1 << 20)
    lines = got.decode().splitlines(keepends=True)
    assert lines[:-1] == [line(number) for number in range(len(lines) - 1)]
    lost = re.fullmatch(r"(\d+) lines of the log were lost here: .*\n", lines[-1])
    assert lost is not None
    assert int(lost[1]) == most - (len(lines) - 1)


def test_a_file_takes_all_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        outlet = Outlet(file.fileno())
        outlet.write("é" * 100_000 + "\ud800\n")
        outlet.flush()
    assert (tmp_path / "log").read_bytes() == "é".encode() * 100_000 + b"\\ud800\n"


def test_a_reader_that_is_gone(pipe: Pipe) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        outlet = Outlet(writer)
        outlet.write("a\n")
        with pytest.raises(BrokenPipeError):
            outlet.flush()
        outlet.write("b\n")
        outlet.finish(0.1)
    finally:
        os.close(writer)


async def test_a_reader_that_stops_stops_no_request() -> None:
    """Far more is logged than a pipe takes, and nobody reads it; then somebody does, and the process ends in order."""
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--admin-port", "0", "--backend", "http://127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            port = None
            while port is None:
                found = re.search(rb"listening on http://127\.0\.0\.1:(\d+)", process.stderr.readline())
                port = found and int(found[1])
            client = await RawClient.connect("127.0.0.1", port)
            try:
                statuses = {(await client.ask(s.get("/none"))).status for _ in range(600)}
            finally:
                client.fin()
            assert statuses == {404}
            process.terminate()
            rest = process.stderr.read()
            assert rest.count(b"outcome=refused") == 600
            assert process.wait(20) == 0
        finally:
            process.kill()
