"""The process's own log, on standard error; and a writer of lines for the access log.

A message may quote what a client or a backend sent, so control characters are escaped: a line is one record, but for
tracebacks, whose lines are indented in the text form. The access log writes whole lines, some at a time: a system call for
each exchange would cost more than the line. It is on the event loop's thread, and waits for no reader (`telemetry.outlet`).
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Protocol

from gateway.telemetry.accesslog import rfc3339

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # all but the tab


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{rfc3339(record.created)} {record.levelname} {record.name}: {_one_line(record.getMessage())}"
        trace = _trace(self, record)
        return line if trace is None else "\n    ".join([line, *(_one_line(each) for each in trace.splitlines())])


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        trace = _trace(self, record)
        if trace is not None:
            fields["trace"] = trace
        return json.dumps(fields)


class Stream(Protocol):
    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


def configure(level: str, form: str, stream: Stream | None = None) -> None:
    """Set the root logger up, in place of whatever was there. `level`: debug, info, ...; `form`: text or json."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter({"text": TextFormatter, "json": JsonFormatter}[form]())
    root = logging.getLogger()
    for other in list(root.handlers):
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.raiseExceptions = False  # a full disk is no reason to fill it with tracebacks
    logging.captureWarnings(True)


class LineWriter:
    """Writes lines to a stream. One that fails loses them, counted in `lost`: a log may not take down what it tells of."""

    __slots__ = ("_stream", "lost")

    def __init__(self, stream: Stream):
        self._stream = stream
        self.lost = 0

    def __call__(self, lines: list[str]) -> None:
        try:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost += len(lines)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts) or None


def _one_line(text: str) -> str:
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
