"""The process's own figures: as Prometheus's own client has them, and without a list of ten thousand descriptors in one go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import ProcessCollector

from gateway.telemetry.process import AT_A_TIME, Process


def read(process: Process) -> dict[str, tuple[str, str, float]]:
    return {each[0]: each[1:] for each in process.read() if each is not None}


def test_names_help_and_values_are_those_of_prometheus_client() -> None:
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
    try:
        found = read(Process())
        theirs = {family.name: family for family in ProcessCollector(registry=None).collect()}
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert {name: each[:2] for name, each in found.items()} == {
        name: (family.type, family.documentation) for name, family in theirs.items()
    }
    for name, family in theirs.items():
        close = {"process_open_fds": 2, "process_cpu_seconds": 0.5}.get(name, family.samples[0].value * 0.05)
        assert found[name][2] == pytest.approx(family.samples[0].value, abs=close), name


def test_descriptors_are_counted_some_at_a_time_where_linux_does_not_say(tmp_path: Path) -> None:
    """Before Linux 6.2 the folder has no size: here a file system's folder, told to have none."""
    folder = tmp_path / "self" / "fd"
    folder.mkdir(parents=True)
    for number in range(3 * AT_A_TIME + 5):
        (folder / str(number)).touch()

    class Sizeless(type(tmp_path)):  # type: ignore[misc]
        def stat(self, **options: bool) -> os.stat_result:
            return os.stat_result([0] * 10)

    items = list(Process(Sizeless(tmp_path)).read())
    assert items[-1] is not None
    assert items[-1][0] == "process_open_fds" and items[-1][3] == 3 * AT_A_TIME + 5
    assert items.count(None) == 5  # one before the descriptors, three within, one at their end


def test_without_proc(tmp_path: Path) -> None:
    assert list(read(Process(tmp_path))) == ["process_max_fds"]
