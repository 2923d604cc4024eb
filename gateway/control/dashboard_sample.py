"""What the live page shows, computed: a look at all that is in flight each second, and what ended between two looks.

Pure: exchanges and the time come in. Tokens are what the meter knows of them: events, until a stream says better. An
engine that tells usage only at the end, and bundles tokens, therefore shows less pace while it streams, and the rest in
the second of its end.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from gateway.core.exchange import Exchange
from gateway.core.outcome import Outcome, Phase
from gateway.telemetry.durations import durations, ttft
from gateway.telemetry.observer import Silent

STREAMS_MOST = 200  # exchanges that one sample describes, the longest under way; the others are counted only
TEXT_MOST = 128  # characters of a client's text: paths and models may be of any length
WINDOW = 10  # looks over which quantiles are taken: with one request a second there is something to be seen
PACE_SECONDS = 2.0  # of the mean in which a stream's pace is told: no token in 10 s, and it is next to nothing


class Sketch:
    """Quantiles within 2 %, in bounded space: counts in buckets that are 4 % wide, from a microsecond to a day."""

    _LEAST, _GROWTH, _BUCKETS = 1e-6, 1.04, 640

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        bucket = math.ceil(math.log(max(seconds, self._LEAST) / self._LEAST) / math.log(self._GROWTH))
        self.counts[min(bucket, self._BUCKETS)] += 1

    @classmethod
    def quantiles(cls, sketches: Iterable[Sketch], *shares: float) -> list[float] | None:
        """By nearest rank over all of the sketches; None where they are empty."""
        counts: Counter[int] = Counter()
        for sketch in sketches:
            counts.update(sketch.counts)
        ranks = [math.ceil(share * counts.total()) for share in shares]
        found = []
        for rank in ranks:
            below = 0
            for bucket in sorted(counts):
                below += counts[bucket]
                if below >= rank:
                    found.append(float(f"{cls._LEAST * cls._GROWTH ** (bucket - 0.5):.3g}"))
                    break
        return found or None


class _Seen:
    """What the last look at an exchange saw."""

    __slots__ = ("at", "first_token", "pace", "tokens")

    def __init__(self, tokens: int, first_token: bool, at: float):
        self.tokens, self.first_token, self.at = tokens, first_token, at
        self.pace: float | None = None  # tokens a second


class Sampler(Silent):
    """An observer of exchanges that is also shown those under way: `look` at each of them, then take the `point`."""

    def __init__(self, began: float):
        self._began = self._last_point = began
        self._seen: dict[Exchange, _Seen] = {}
        self._tokens: Counter[str | None] = Counter()  # by backend, since the last point
        self._outcomes: Counter[str] = Counter()  # since the last point
        self._ttft: deque[Sketch] = deque([Sketch()], maxlen=WINDOW)
        self._tpot: deque[Sketch] = deque([Sketch()], maxlen=WINDOW)
        self._begin()

    def _begin(self) -> None:
        self.phases: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []  # of the exchanges that were looked at first

    # ---- what is shown to it ----

    def look(self, exchange: Exchange, now: float) -> None:
        """One that is under way. The longest first: only so many are described."""
        if exchange.outcome is not None:  # it ends just now, and `ended` tells of it
            return
        seen = self._take_in(exchange, now)
        self._seen[exchange] = seen
        self.phases[exchange.phase] += 1
        if len(self.rows) < STREAMS_MOST:
            self.rows.append(_row(exchange, seen, now))

    def ended(self, exchange: Exchange) -> None:
        self._take_in(exchange, exchange.ended or self._last_point)
        self._seen.pop(exchange, None)
        self._outcomes[exchange.outcome or Outcome.INTERNAL] += 1
        *_, tpot, _total = durations(exchange)
        if tpot is not None:
            self._tpot[-1].add(tpot)

    def _take_in(self, exchange: Exchange, now: float) -> _Seen:
        """Count what has come since the last look. Of one that was there before all looks, the past is not counted."""
        tokens = exchange.meter.output_tokens if exchange.meter is not None else 0
        first = ttft(exchange)
        seen = self._seen.get(exchange)
        if seen is None:
            new = exchange.accepted >= self._began
            seen = _Seen(0 if new else tokens, not new and first is not None, max(exchange.accepted, self._began))
        more = max(tokens - seen.tokens, 0)
        self._tokens[exchange.backend] += more
        if first is not None and not seen.first_token:
            self._ttft[-1].add(first)
        seen.pace = _pace(exchange, seen, tokens, more, now)
        seen.tokens, seen.first_token, seen.at = tokens, first is not None, now
        return seen

    # ---- what it tells ----

    def point(self, now: float, wall: float) -> tuple[dict[str, Any], dict[str | None, float]]:
        """The second that has passed, for the plots; and tokens a second by backend. Ends the round of looks.

        `t`: seconds since 1970. `tokens`: a second. `ttft`, `tpot`: seconds, the median and the 95th percentile of the
        last `WINDOW` looks, or None. `ended`: how many by outcome. `waiting`: of those in flight, without a token yet.
        """
        seconds = max(now - self._last_point, 1e-3)
        in_flight = self.phases.total()
        point = {
            "t": round(wall, 1),
            "in_flight": in_flight,
            "waiting": in_flight - self.phases[Phase.STREAM] - self.phases[Phase.DONE],
            "tokens": round(self._tokens.total() / seconds, 1),
            "ttft": Sketch.quantiles(self._ttft, 0.5, 0.95),
            "tpot": Sketch.quantiles(self._tpot, 0.5, 0.95),
            "ended": dict(self._outcomes),
        }
        by_backend = {name: round(tokens / seconds, 1) for name, tokens in self._tokens.items()}
        self._last_point = now
        self._tokens, self._outcomes = Counter(), Counter()
        self._ttft.append(Sketch())
        self._tpot.append(Sketch())
        self._begin()
        return point, by_backend


def _pace(exchange: Exchange, seen: _Seen, tokens: int, more: int, now: float) -> float | None:
    """Tokens a second: at first the mean since the first token, then a mean that forgets."""
    first = exchange.meter.first_output if exchange.meter is not None else None
    since = first if seen.pace is None else seen.at
    if first is None or since is None or now <= since:
        return seen.pace
    if seen.pace is None:
        return (tokens - 1) / (now - since)
    seconds = now - since
    return seen.pace + -math.expm1(-seconds / PACE_SECONDS) * (more / seconds - seen.pace)


def _row(exchange: Exchange, seen: _Seen, now: float) -> dict[str, Any]:
    """One exchange for people. `tokens` is None where nobody can count them, `silent_s` where it is not streaming."""
    meter, paused_at = exchange.meter, exchange.paused_at
    last = meter.last_output if meter is not None and exchange.phase is Phase.STREAM else None
    held = exchange.paused_seconds + (now - paused_at if paused_at is not None else 0.0)
    return {
        "request_id": short(exchange.request_id),
        "client": short(exchange.client),
        "method": exchange.method,
        "path": short(exchange.path),
        "model": short(exchange.model),
        "backend": short(exchange.backend),
        "phase": exchange.phase.value,
        "age_s": round(now - exchange.accepted, 1),
        "tokens": seen.tokens if meter is not None else None,
        "tokens_per_s": round(seen.pace, 1) if seen.pace is not None else None,
        "silent_s": round(max(now - last, 0.0), 1) if last is not None else None,
        "bytes_out": exchange.bytes_out,
        "paused": paused_at is not None,
        "held_back_s": round(held, 1),
    }


def short(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_MOST else text[: TEXT_MOST - 1] + "…"
