"""What Linux says of this process, under the names that Prometheus's own clients have for it.

Not by `prometheus_client.ProcessCollector`: it lists /proc/self/fd, which with ten thousand streams takes the event loop's
time for 20 ms. Since 6.2 Linux says their number without a list of them; before that they are counted some at a time.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

AT_A_TIME: Final = 64  # names that are read without a cut
_PROC: Final = Path("/proc")


class Process:
    """`read` says what is not known as little as `prometheus_client` does: the sample is left out."""

    def __init__(self, proc: Path = _PROC):
        self._proc = proc
        self._tick = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._booted = _booted(proc)

    def read(self) -> Iterator[tuple[str, str, str, float] | None]:
        """Name without `_total`, kind, help and value of each; None where there is a cut."""
        with_stat = self._stat()
        if with_stat is not None:
            # proc(5), counted from the field after the command's name: utime 11, stime 12, starttime 19, vsize 20, rss 21
            utime, stime, begun, virtual, resident = (int(with_stat[place]) for place in (11, 12, 19, 20, 21))
            yield "process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", virtual
            yield "process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", resident * self._page
            if self._booted is not None:
                started = begun / self._tick + self._booted
                yield "process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.", started
            help_ = "Total user and system CPU time spent in seconds."
            yield "process_cpu_seconds", "counter", help_, (utime + stime) / self._tick
        yield None
        yield (
            "process_max_fds", "gauge", "Maximum number of open file descriptors.",
            float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        )  # fmt: skip
        count = 0
        for counted in self._descriptors():
            count = counted
            yield None
        if count:
            yield "process_open_fds", "gauge", "Number of open file descriptors.", float(count)

    def _stat(self) -> list[bytes] | None:
        try:
            return (self._proc / "self/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None

    def _descriptors(self) -> Iterator[int]:
        """How many are open: the last number is it."""
        path = self._proc / "self/fd"
        try:
            known = path.stat().st_size
            if known:
                yield known
                return
            count = 0
            with os.scandir(path) as names:
                for _ in names:
                    count += 1
                    if count % AT_A_TIME == 0:
                        yield count
            yield count
        except OSError:
            return


def _booted(proc: Path) -> float | None:
    """When, in seconds since the epoch."""
    try:
        for line in (proc / "stat").read_bytes().splitlines():
            if line.startswith(b"btime "):
                return float(line.split()[1])
    except OSError:
        pass
    return None
