"""What observing costs, in microseconds for each exchange: `python -m tests.telemetry.cost`."""

from __future__ import annotations

import time
from collections.abc import Callable
from io import StringIO

from gateway.core.dialects import for_path
from gateway.core.exchange import Exchange
from gateway.core.meter import Meter
from gateway.telemetry.accesslog import AccessLog
from gateway.telemetry.histogram import B_TPOT
from gateway.telemetry.logs import LineWriter
from gateway.telemetry.observer import Observers
from tests.telemetry.fakes import ACCEPTED, House, ended, stream

BODY = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


def one_token() -> Exchange:
    dialect = for_path("/v1/chat/completions")
    assert dialect is not None
    meter = Meter(dialect, B_TPOT, True)
    meter.feed(BODY, ACCEPTED + 0.5)
    meter.end()
    return ended(stream(meter=meter))


def measure(what: Callable[[Exchange], None], n: int = 20000, rounds: int = 7) -> float:
    best = float("inf")
    for _ in range(rounds):
        exchanges = [one_token() for _ in range(n)]
        began = time.process_time()
        for exchange in exchanges:
            what(exchange)
        best = min(best, time.process_time() - began)
    return best / n * 1e6


def main() -> None:
    metrics = House().metrics()
    print(f"Metrics.ended          {measure(metrics.ended):6.2f} us")
    for form in ("text", "json"):
        log = AccessLog(LineWriter(StringIO()), wall=time.time, form=form, later=lambda flush: None)
        print(f"AccessLog.ended {form}   {measure(log.ended):6.2f} us")
    both = Observers(metrics, AccessLog(LineWriter(StringIO()), wall=time.time, form="json", later=lambda flush: None))
    print(f"Observers.ended, both  {measure(both.ended):6.2f} us")
    began = time.process_time()
    pieces, _ = metrics.render(None)
    body = b"".join(pieces)
    print(f"a scrape of {body.count(10)} lines: {(time.process_time() - began) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
