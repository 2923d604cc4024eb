"""Backends from files that somebody else writes: watched, and read again when they change.

A look is a `stat` of each file, which follows links, so that a file that was replaced (its inode is another), a ConfigMap
(whose directory is a link that is swapped) and a file written in place (its time and size) are all noticed. A file that
is being written is left until it has been quiet for a moment; what is half there all the same is refused as a whole, as
YAML or as a list of backends, and looked at again when it changes, and every `AGAIN` seconds: what stood against it may have
been elsewhere, as where there was no descriptor to open it with, or a key that it names was not there yet.
"""

from __future__ import annotations

import asyncio
import glob
import math
import os
import stat
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from gateway.control.discovery import Snapshot, SourceFailed
from gateway.core.members import Member
from gateway.errors import ConfigError

LOOK = 1.0  # seconds between looks, where the interval is not shorter
QUIET = 0.1  # seconds that nothing changes before files are read
AGAIN = 10.0  # seconds until one that could not be used is read again, though it has not changed
QUIET_MOST = 20  # such pauses; after them what never rests is read as it is

Stamp = tuple[tuple[str, int, int, int, int], ...]  # of each file: path, device, inode, size, nanoseconds


class FileSource:
    """`pattern`: a path, of which the last part may be a pattern. `read`: the backends of one file; raises ConfigError."""

    def __init__(self, pattern: str, interval: float, read: Callable[[Path], Sequence[Member]]):
        self._pattern, self._interval, self._read = pattern, interval, read
        self._stamp: Stamp | None = None  # of what was read last, whether or not it could be used
        self._again = math.inf  # when that is to be read again, if it could not

    @property
    def name(self) -> str:
        return f"file {self._pattern}"

    @property
    def settings(self) -> tuple[str, float]:
        return self.name, self._interval

    @property
    def longest_pause(self) -> float:
        return min(self._interval, LOOK)

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        while True:
            try:
                stamp = await asyncio.to_thread(_stamp, self._pattern)
            except SourceFailed:
                self._stamp = None  # should it come back as it was, that is news
                raise
            if stamp != self._stamp or time.monotonic() >= self._again:
                stamp = await self._settled(stamp)
                # before it is read: what is written meanwhile is seen at the next look
                self._stamp, self._again = stamp, math.inf
                try:
                    snapshot = await asyncio.to_thread(self._look, stamp)
                except SourceFailed:
                    self._again = time.monotonic() + AGAIN
                    raise
                try:
                    yield snapshot
                except GeneratorExit:  # it could not be put in force: it is to be tried again
                    self._stamp = None
                    raise
            await asyncio.sleep(min(self._interval, LOOK))

    async def _settled(self, stamp: Stamp) -> Stamp:
        for _ in range(QUIET_MOST):
            await asyncio.sleep(QUIET)
            before, stamp = stamp, await asyncio.to_thread(_stamp, self._pattern)
            if stamp == before:
                break
        return stamp

    def _look(self, stamp: Stamp) -> Snapshot:
        members: list[Member] = []
        for path, *_ in stamp:
            try:
                members += self._read(Path(path))
            except ConfigError as error:
                raise SourceFailed(str(error)) from None
        return tuple(dict.fromkeys(members))  # what several files say alike is one


def _stamp(pattern: str) -> Stamp:
    """Raises SourceFailed, where there is no such file."""
    if not glob.has_magic(pattern):
        paths = [pattern]
    else:
        paths = sorted(glob.glob(pattern))
        if not paths:
            raise SourceFailed("no file has such a name; expected one at least ([] in it for no backends)")
    stamp = []
    for path in paths:
        try:
            about = os.stat(path)
        except OSError as error:
            raise SourceFailed(f"{path} cannot be read ({error.strerror}); expected a list of backends in it") from None
        if not stat.S_ISREG(about.st_mode):  # a pipe would keep whoever opens it waiting, and with it the gateway's end
            raise SourceFailed(f"{path} is no regular file; expected one, with a list of backends in it")
        stamp.append((path, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns))
    return tuple(stamp)
