"""Streams of events by hand, and what a meter makes of them.

Times are milliseconds in whole numbers, so that sums and gaps are exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gateway.core.dialects import Dialect
from gateway.core.meter import Meter

EDGES = tuple(range(400))  # a bucket for each gap


def sse(said: Any, type: str = "") -> bytes:
    head = f"event: {type}\n" if type else ""
    return f"{head}data: {json.dumps(said, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def chunk(delta: Any, finish: str | None = None, usage: tuple[int, int] | None = None, index: int = 0) -> bytes:
    said = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return sse({**said, "choices": [choice], **({"usage": counted(*usage)} if usage else {})})


def counted(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token(text: str, finish: str | None = None, usage: tuple[int, int] | None = None, index: int = 0) -> bytes:
    return chunk({"content": text}, finish, usage, index)


def total(prompt: int, completion: int) -> bytes:
    return sse({"id": "c", "choices": [], "usage": counted(prompt, completion)})


ROLE = chunk({"role": "assistant", "content": ""})
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}\n\n'
START = ROLE + token("a")

Timed = list[tuple[int, bytes]]


class Blind(Meter):
    """Without shapes: it decodes every event."""

    __slots__ = ()

    def _learn(self, raw: bytes, reading: Any) -> None:
        pass


def metered(dialect: Dialect, timed: Iterable[tuple[int, bytes]], kind: type[Meter] = Meter) -> Meter:
    meter = kind(dialect, EDGES, streamed=True)
    for at, octets in timed:
        meter.feed(octets, at)
    meter.end()
    return meter


def gaps(meter: Meter) -> list[int]:
    """In order of size."""
    return [gap for gap, n in enumerate(meter.itl_counts) for _ in range(n)]


def totals(meter: Meter, *, times: bool = False) -> dict[str, Any]:
    """What does not depend on how the stream was split; and with `times`, all else too."""
    names = "events choices finish_reason terminal error opaque prompt_tokens cached_tokens output_tokens token_source"
    names += " k_first"
    if times:
        names += " first_output last_output first_visible reads itl_counts itl_sum itl_n max_gap tpot tpot_skipped"
    return {name: getattr(meter, name) for name in names.split()} | {"verdict": meter.verdict(True)}


def unstreamed(dialect: Dialect, body: bytes, size: int = 7) -> Meter:
    meter = Meter(dialect, EDGES, streamed=False)
    for at in range(0, len(body), size):
        meter.feed(body[at : at + size], at)
    meter.end()
    return meter
