"""One line an exchange: who asked for what, how it ended, how long it took; never what was said.

A line is one line, and its fields are ours, whatever a client put into its path, its model's name or its request id:
JSON is written in ASCII with everything else escaped, and in the text form a value that is not plain is a JSON string.
Values have a length limit, so that nobody fills a disk by way of long paths.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from gateway.core.exchange import Exchange
from gateway.telemetry.durations import durations
from gateway.telemetry.observer import Silent

MAX_TEXT = 2048
TOGETHER = 64  # exchanges whose lines are made together, at most

Field = str | int | float | bool | None

_PLAIN = re.compile(r'[^\x00-\x20"=\\\x7f-\U0010ffff]+')
_STREAM = {None: "", True: " stream=true", False: " stream=false"}
_NAMES = ("queue_s", "connect_s", "ttfb_s", "ttft_s", "tpot_s", "duration_s")  # of durations
_TIMES = "".join(f" {name}=%.6f" for name in _NAMES)  # one format for all costs half of one for each
_UNPACED = _TIMES.replace(" tpot_s=%.6f", "")
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_encode_fast = msgspec.json.Encoder().encode


class AccessLog(Silent):
    """Writes a line (without its end) for each exchange that ended. `wall` is the time of day, in seconds; `later` runs a
    callback soon.

    Lines are made some dozens at a time, which costs less than half of making each as its exchange ends; without `later`, at
    once.
    """

    __slots__ = ("_asked", "_ended", "_later", "_text", "_wall", "_write")

    def __init__(
        self,
        write: Callable[[list[str]], object],
        *,
        wall: Callable[[], float],
        form: str = "text",
        later: Callable[[Callable[[], None]], object] | None = None,
    ):
        self._write, self._wall, self._later = write, wall, later
        self._text = {"json": False, "text": True}[form]
        self._ended: list[tuple[Exchange, float]] = []  # and when
        self._asked = False  # `later` has been, and has still to call

    def ended(self, exchange: Exchange) -> None:
        self._ended.append((exchange, self._wall()))
        if self._later is None or len(self._ended) >= TOGETHER:
            self.flush()
        elif not self._asked:
            self._asked = True
            self._later(self._called)

    def _called(self) -> None:
        self._asked = False
        self.flush()

    def flush(self) -> None:
        """Write what waits; at the end of the process, whoever ends it calls this."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        if self._text:
            self._write([usual_text(x, now) or to_text(fields(x, now)) for x, now in ended])
        else:
            self._write([to_json(fields(x, now)) for x, now in ended])


def usual_text(x: Exchange, now: float) -> str | None:
    """What `to_text` makes of `fields`, in one go, at a third of the cost; None where a value is not plain, or too long."""
    given = f"{x.request_id}{x.client}{x.method}{x.path}{x.model}{x.backend}{x.key}{x.trace_id}{x.prefill_backend}{x.code}"
    if x.migrated_from is not None or len(given) > MAX_TEXT or not _PLAIN.fullmatch(given) or "?" in given:
        return None
    meter = x.meter
    prompt_tokens, output_tokens = (None, None) if meter is None else (meter.prompt_tokens, meter.output_tokens)
    times = queue, connect, first_byte, ttft, tpot, total = durations(x)
    if None not in times:
        took = _TIMES % times
    elif tpot is None and None not in (known := (queue, connect, first_byte, ttft, total)):  # of a stream of one token
        took = _UNPACED % known
    else:
        took = "".join([f" {name}={seconds:.6f}" for name, seconds in zip(_NAMES, times, strict=True) if seconds is not None])
    line = (
        f"time={rfc3339(now)} request_id={x.request_id}{'' if x.trace_id is None else f' trace_id={x.trace_id}'} "
        f"client={x.client}{'' if x.key is None else f' key={x.key}'} method={x.method} path={x.path}"
        f"{'' if x.model is None else f' model={x.model}'}{_STREAM[x.stream]}"
        f"{'' if x.backend is None else f' backend={x.backend}'}"
        f"{'' if x.prefill_backend is None else f' prefill_backend={x.prefill_backend}'}"
        f"{'' if x.status is None else f' status={x.status}'}{'' if x.outcome is None else f' outcome={x.outcome}'}"
        f"{'' if x.code is None else f' code={x.code}'} phase={x.phase} bytes_in={x.bytes_in} bytes_out={x.bytes_out}"
        f"{took}{'' if prompt_tokens is None else f' prompt_tokens={prompt_tokens}'}"
        f"{'' if output_tokens is None else f' output_tokens={output_tokens}'} attempts={x.attempts}"
    )
    return None if "= " in line else line  # a value that is empty is to be seen as such


def fields(exchange: Exchange, now: float) -> dict[str, Field]:
    """All the fields, in their order; None where there is nothing to say."""
    meter = exchange.meter
    queue, connect, first_byte, ttft, tpot, total = durations(exchange)
    return {
        "time": rfc3339(now),
        "request_id": _short(exchange.request_id),
        "trace_id": _short(exchange.trace_id),
        "client": _short(exchange.client),
        "key": _short(exchange.key),
        "method": _short(exchange.method),
        "path": _short(exchange.path.partition("?")[0]),  # a query may hold anything, keys too
        "model": _short(exchange.model),
        "stream": exchange.stream,
        "backend": exchange.backend,
        "prefill_backend": exchange.prefill_backend,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "code": exchange.code,
        "phase": exchange.phase,
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
        "queue_s": _rounded(queue),
        "connect_s": _rounded(connect),
        "ttfb_s": _rounded(first_byte),
        "ttft_s": _rounded(ttft),
        "tpot_s": _rounded(tpot),
        "duration_s": _rounded(total),
        "prompt_tokens": None if meter is None else meter.prompt_tokens,
        "output_tokens": None if meter is None else meter.output_tokens,
        "attempts": exchange.attempts,
        "migrated_from": exchange.migrated_from,
    }


def to_json(record: dict[str, Field]) -> str:
    try:
        line = _encode_fast(record)
    except UnicodeEncodeError:  # octets that are no UTF-8, kept as lone surrogates
        return _escaped(record)
    # It leaves alone what is not ASCII, line separators and terminal controls among it: the slower one does not.
    return line.decode() if line.isascii() and b"\x7f" not in line else _escaped(record)


def to_text(record: dict[str, Field]) -> str:
    words = [
        f"{name}={value:.6f}"  # 1e-05 is a number to JSON, but not to everybody's awk
        if value.__class__ is float
        else f"{name}={value}"
        if value is not True and value is not False
        else f"{name}={'true' if value else 'false'}"
        for name, value in record.items()
        if value is not None
    ]
    line = " ".join(words)
    # One look at the whole line: with a separator, a quote or a control character in some value it would not pass.
    if (
        line.count("=") == len(words) == line.count(" ") + 1
        and line.isascii()
        and line.isprintable()
        and not ('"' in line or "\\" in line or "= " in line or line.endswith("="))
    ):
        return line
    return " ".join([_careful(word) for word in words])


def _careful(word: str) -> str:
    name, _, value = word.partition("=")
    return word if _PLAIN.fullmatch(value) else f"{name}={_escaped(value)}"


def rfc3339(seconds: float) -> str:
    milliseconds = int(seconds * 1000)
    return f"{_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@functools.lru_cache(maxsize=4)  # thousands of lines are of one second
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _escaped(value: dict[str, Field] | str) -> str:
    return _encode(value).replace("\x7f", "\\u007f")


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
