"""What the meter costs, in nanoseconds an event: `python -m tests.bench.bench_meter`.

Figures to compare with each other and with those of another day on one machine: the best of several rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from gateway.core.dialects import chat, messages, responses
from gateway.core.meter import Meter

EDGES = tuple(0.001 * 1.5**i for i in range(24))
EVENTS = 4_000
ROUNDS = 25

_CHAT = (
    '{"id":"chatcmpl-a52d561648f33281","object":"chat.completion.chunk","created":1796106458,"model":"tiny","choices":'
    '[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null,"token_ids":null}]%s}'
)
TOKEN = f"data: {_CHAT % (' token', '')}\n\n".encode()
QUOTED = f"data: {_CHAT % (chr(92) + chr(34), '')}\n\n".encode()
USAGE = (
    "data: " + _CHAT % (" token", ',"usage":{"prompt_tokens":9,"total_tokens":14,"completion_tokens":5}') + "\n\n"
).encode()
CRLF = TOKEN.replace(b"\n", b"\r\n")
MESSAGES = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":" token"},"index":0}\n\n'
)
RESPONSES = (
    b"event: response.output_text.delta\n"
    b'data: {"content_index":0,"delta":" token","item_id":"msg_9c13cf6cdb6988df","logprobs":[],"output_index":0,'
    b'"sequence_number":%d,"type":"response.output_text.delta"}\n\n'
)


def best(run: Callable[[], int]) -> float:
    """Nanoseconds an event, of the quickest round."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        events = run()
        rounds.append((time.perf_counter_ns() - began) / events)
    return min(rounds)


def fed(payload: bytes, each: int = 1, dialect: object = chat) -> int:
    meter = Meter(dialect, EDGES, streamed=True)  # type: ignore[arg-type]
    now, feed = 0.0, meter.feed
    for _ in range(EVENTS // each):
        now += 0.013
        feed(payload, now)
    assert meter.events == EVENTS // each * each
    return meter.events


def by_relay() -> int:
    """As the relay does it: the test of the shape on the chunk itself, then `output`."""
    meter = Meter(chat, EDGES, streamed=True)
    meter.feed(TOKEN, 0.0)
    now = 0.0
    for _ in range(EVENTS):
        now += 0.013
        shape = meter.shape
        if shape is not None:
            prefix, suffix = shape
            if TOKEN.startswith(prefix):
                begin = len(prefix)
                quote = TOKEN.find(b'"', begin)
                if TOKEN.endswith(suffix) and len(TOKEN) - quote == len(suffix) and quote - begin >= meter.least:
                    meter.output(now)
    return meter.events


def only_output() -> int:
    meter = Meter(chat, EDGES, streamed=True)
    meter.feed(TOKEN, 0.0)
    now, output = 0.0, meter.output
    for _ in range(EVENTS):
        now += 0.013
        output(now)
    return meter.events


def split(payload: bytes, size: int) -> int:
    """Reads that pay no heed to where events end."""
    meter = Meter(chat, EDGES, streamed=True)
    stream = payload * EVENTS
    now = 0.0
    for at in range(0, len(stream), size):
        now += 0.013
        meter.feed(stream[at : at + size], now)
    assert meter.events == EVENTS
    return meter.events


def loads() -> int:
    """A yardstick: what the plainest of decoders takes."""
    for _ in range(EVENTS):
        json.loads(TOKEN[6:])
    return EVENTS


CASES: dict[str, Callable[[], int]] = {
    "(json.loads of one event)": loads,
    "output() alone": only_output,
    "shape tested by the relay, output()": by_relay,
    "shape, one event a read": lambda: fed(TOKEN),
    "shape, 8 events a read": lambda: fed(TOKEN * 8, 8),
    "shape, reads of 4096 octets": lambda: split(TOKEN, 4096),
    "shape, reads of 100 octets": lambda: split(TOKEN, 100),
    "shape, messages": lambda: fed(MESSAGES, 1, messages),
    "decoded: an escaped quote": lambda: fed(QUOTED),
    "decoded: usage in each event": lambda: fed(USAGE),
    "decoded: usage, 8 events a read": lambda: fed(USAGE * 8, 8),
    "decoded: CRLF": lambda: fed(CRLF),
    "decoded: responses": lambda: fed(RESPONSES % 7, 1, responses),
}

if __name__ == "__main__":
    for name, run in CASES.items():
        print(f"{name:38} {best(run):7.0f} ns/event")
