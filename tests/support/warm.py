"""Gateways forked from a process that has imported all of it: a start takes some 50 ms in place of half a second.

`start` runs `tokenpipe ARGUMENTS` as `python -m gateway ARGUMENTS` would be run: a session of its own, its own output, and a
child of the calling process (which adopts it, as PR_SET_CHILD_SUBREAPER of prctl(2) has it), with an exit status to wait for.
Only the interpreter is not a new one; tests of what happens before `gateway.cli.main` start a process of their own.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONWARNINGS": "default::ResourceWarning", "PYTHONUNBUFFERED": "1"}
_SET_CHILD_SUBREAPER = 36
_MOST = 1 << 16  # octets of a command line


class Forked(subprocess.Popen[bytes]):
    """A process that has been started already, to be waited for like any other."""

    def __init__(self, pid: int, arguments: Sequence[str]):
        self.pid, self.args, self.returncode = pid, arguments, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25
        self._communication_started = False


class _Server:
    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], out: IO[bytes], err: IO[bytes]) -> Forked:
        handed = array.array("i", [out.fileno(), err.fileno()])
        self._socket.sendmsg([json.dumps(arguments).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)])
        pid = self._socket.recv(_MOST)
        assert pid, "whoever starts gateways has ended"
        return Forked(int(pid), arguments)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


_server: _Server | None = None


def start(arguments: Sequence[str], out: IO[bytes], err: IO[bytes]) -> Forked:
    global _server
    if _server is None:
        _server = _Server()
    return _server.start(arguments, out, err)


def _serve(asked: socket.socket) -> list[str]:
    """Fork for each command line that comes. Returns in the child that is to run one; the server itself ends here."""
    while True:
        text, handed, _, _ = socket.recv_fds(asked, _MOST, 2)
        if not text:
            os._exit(0)
        # of two generations, so that whoever asked adopts the second one, once the first one is gone
        reading, writing = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)
            asked.send(os.read(reading, 20))
            for descriptor in (*handed, reading, writing):
                os.close(descriptor)
            continue
        if pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(reading)
        os.close(writing)
        os.setsid()
        for number, descriptor in enumerate(handed, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        asked.close()
        return list(json.loads(text))


if __name__ == "__main__":
    import gateway.app
    import gateway.synthetic.server  # noqa: F401
    from gateway.cli import main

    sys.argv = ["tokenpipe", *_serve(socket.socket(fileno=int(sys.argv[1])))]
    main()
