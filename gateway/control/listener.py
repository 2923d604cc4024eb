"""Listeners that are aiohttp's: those of the operator and of engines, on whom no stream depends."""

from __future__ import annotations

import logging
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

QUOTED = 200  # characters of what could not be read

_log = logging.getLogger("aiohttp.server")


async def listening(app: web.Application, sock: socket.socket) -> web.AppRunner:
    """Serve `app` there, until the runner's cleanup."""
    _log.addFilter(_callers_fault)  # once, however often it is called
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=128).start()
    return runner


def _callers_fault(record: logging.LogRecord) -> bool:
    """aiohttp logs an error, and where in its code, for requests that are no HTTP and for callers that leave. A line says all
    there is to the first, and nobody asks about the second."""
    wrong = record.exc_info[1] if record.exc_info else None
    if isinstance(wrong, ConnectionError):
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    elif isinstance(wrong, HttpProcessingError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "a request that cannot be read: %s", (" ".join(str(wrong).split())[:QUOTED],)
        record.exc_info = None
    return _log.isEnabledFor(record.levelno)
