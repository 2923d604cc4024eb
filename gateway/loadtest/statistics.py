"""From records to figures. Pure.

The figures under vLLM's names are computed by vLLM's formulas (vllm/benchmarks/serve.py, calculate_metrics): percentiles by
linear interpolation, standard deviations of the population, E2EL to the last output event, TPOT = (E2EL - TTFT) / (N - 1),
and a TPOT of 0 for a single token where goodput asks for one. Ours, where they differ, have names of their own: `duration`
reaches to the terminal event, and `tpot_adjusted` leaves out as many tokens as the first event held, and all streams
whose gaps mean nothing (metrics.md 2.3).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from gateway.core.outcome import Outcome
from gateway.loadtest.endpoints import Kind
from gateway.loadtest.records import Record, Run

# What vLLM's client takes for a success: any stream that had output and ended without a transport error.
_VLLM_SUCCESS = (Outcome.COMPLETE, Outcome.STREAM_ERROR, Outcome.UPSTREAM_TRUNCATED)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, as numpy's default does it; 0 of none, as vLLM reports it."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclasses.dataclass(frozen=True)
class Spread:
    """How values are spread, in their own unit."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]  # percent, value
    ordered: Sequence[float] = dataclasses.field(repr=False, compare=False)


def spread(values: Iterable[float], percents: Sequence[float] = ()) -> Spread:
    ordered = sorted(values)
    count = len(ordered)
    mean = math.fsum(ordered) / count if count else 0.0
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / count) if count else 0.0
    found = tuple((percent, percentile(ordered, percent)) for percent in percents)
    return Spread(count, mean, percentile(ordered, 50), std, found, ordered)


SuccessRule = Callable[[Record], bool]


def success_rule(name: str, kind: Kind) -> SuccessRule:
    """`strict`: its outcome is complete, as was seen: what could not be read may hold an error, and has one in its record.
    `vllm`: what vLLM's client of that endpoint counts as a success.
    """
    if name == "strict" or kind is Kind.RESPONSES:  # there vLLM's client is strict, too
        return lambda record: record.outcome is Outcome.COMPLETE and not record.error
    return lambda record: record.outcome in _VLLM_SUCCESS and len(record.events) > 0


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Seconds, tokens, requests and their rates a second."""

    completed: int
    failed: int
    abandoned: int  # cut by Ctrl-C: neither
    duration: float
    total_input: int
    total_output: int
    request_throughput: float
    request_goodput: float | None  # None: no goodput was asked for
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float  # output events, by whole seconds, as vLLM counts it
    max_concurrent_requests: int  # that touch one whole second, as vLLM counts it
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    client_queue_time: Spread
    e2el_including_client_queue: Spread
    # ours
    tpot_adjusted: Spread
    duration_to_end: Spread
    first_visible: Spread
    max_gap: Spread
    connect: Spread  # of connections that were opened
    outcomes: dict[str, int]
    statuses: dict[int, int]  # of what was answered with no success
    token_sources: dict[str, int]  # of output tokens
    prompt_sources: dict[str, int]  # of prompt tokens: usage, or estimated
    tpot_skipped: dict[str, int]
    events: int
    reads: int


def measure(
    records: Sequence[Record],
    duration: float,
    succeeded: SuccessRule,
    percents: Sequence[float] = (50, 90, 95, 99),
    goodput: dict[str, float] | None = None,
) -> Metrics:
    """`goodput`: seconds that `ttft`, `tpot` and `e2el` may take."""
    good = [record for record in records if succeeded(record)]
    finished = [record for record in records if record.finished]
    failed = [record for record in finished if not succeeded(record)]
    timed = [record for record in good if record.events]
    single = [record for record in good if record.choices <= 1]
    total_input = sum(_prompt_tokens(record) for record in good)
    total_output = sum(record.output_tokens for record in good)
    seconds = max(duration, 1e-9)
    kept = sum(_keeps(record, goodput) for record in good) if goodput else 0
    e2els = [latency for record in good if (latency := record.latency) is not None]
    tokens_most, requests_most = _peaks(timed)
    return Metrics(
        completed=len(good),
        failed=len(failed),
        abandoned=len(records) - len(finished),
        duration=duration,
        total_input=total_input,
        total_output=total_output,
        request_throughput=len(good) / seconds,
        request_goodput=kept / seconds if goodput else None,
        output_throughput=total_output / seconds,
        total_token_throughput=(total_input + total_output) / seconds,
        max_output_tokens_per_s=tokens_most,
        max_concurrent_requests=requests_most,
        ttft=spread((ttft for record in good if (ttft := record.ttft) is not None), percents),
        tpot=spread((tpot for record in good if (tpot := record.tpot_vllm) is not None), percents),
        itl=spread((gap for record in good for gap in record.gaps), percents),
        e2el=spread(e2els, percents),
        client_queue_time=spread((record.queued for record in good), percents),
        e2el_including_client_queue=spread((r.events[-1] - r.arrived for r in timed), percents),
        tpot_adjusted=spread((r.tpot for r in good if r.tpot is not None and r.tpot_skipped is None), percents),
        duration_to_end=spread((record.duration for record in good), percents),
        first_visible=spread((r.first_visible - r.started for r in good if r.first_visible is not None), percents),
        max_gap=spread((max(gaps) for record in single if (gaps := record.gaps)), percents),
        connect=spread((r.sent - r.started for r in finished if r.fresh and r.sent is not None), percents),
        outcomes=dict(Counter(record.outcome.value for record in records).most_common()),
        statuses=dict(Counter(r.status for r in failed if r.status is not None and r.status != 200).most_common()),
        token_sources=_summed((record.token_source, record.output_tokens) for record in good),
        prompt_sources=_summed((_prompt_source(record), _prompt_tokens(record)) for record in good),
        tpot_skipped=dict(Counter(record.tpot_skipped for record in good if record.tpot_skipped).most_common()),
        events=sum(len(record.events) for record in records),
        reads=sum(record.reads for record in records),
    )


def _prompt_tokens(record: Record) -> int:
    return record.prompt_len if record.prompt_tokens is None else record.prompt_tokens


def _prompt_source(record: Record) -> str:
    return "estimated" if record.prompt_tokens is None else "usage"


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, number in pairs:
        sums[name] += number
    return {name: number for name, number in sums.most_common() if number}


def _keeps(record: Record, limits: dict[str, float]) -> bool:
    """Whether a successful request kept all limits: vLLM's rule, by which a single token has a TPOT of 0."""
    values = {"ttft": record.ttft, "tpot": record.tpot_vllm or 0.0, "e2el": record.latency}
    return all((value := values[name]) is not None and value <= limit for name, limit in limits.items())


def _peaks(timed: Sequence[Record]) -> tuple[float, int]:
    """The most output events and the most requests of any whole second since the first request's start."""
    if not timed:
        return 0.0, 0
    begin = min(record.started for record in timed)
    events: Counter[int] = Counter()
    active: Counter[int] = Counter()
    for record in timed:
        events.update(int(at - begin) for at in record.events)
        active.update(range(int(record.started - begin), int(record.events[-1] - begin) + 1))
    return float(max(events.values())), max(active.values())


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """What the tester itself may have added to the figures. Seconds; `cpu`: share of one core."""

    arrival_lag: Spread
    loop_lag: Spread
    cpu: float
    asked_rate: float  # inf: all at once
    arrival_rate: float  # requests a second that it set going
    events_per_second: float
    doubts: tuple[str, ...]  # why the figures may be the tester's rather than the endpoint's


LAG_LEAST = 0.005  # seconds of lag below which nothing is said: the event loop's own grain, and a shared core's
LAG_SHARE = 0.1  # of the median gap, or of the median TTFT where there are no gaps; metrics.md 4.2
BUSY = 0.9  # of one core


def check_tester(run: Run) -> SelfCheck:
    percents = (50, 99, 100)
    records = [record for own in run.records for record in own]
    arrival = spread((max(0.0, record.arrived - record.scheduled) for record in records), percents)
    loop = spread(run.watch.loop_lags, percents)
    gaps = spread(gap for record in records for gap in record.gaps)
    ttfts = spread(ttft for record in records if (ttft := record.ttft) is not None)
    cpu = run.watch.cpu_seconds / max(run.watch.wall_seconds, 1e-9)
    last = max((record.arrived for record in records), default=0.0)
    gap = max((record.scheduled for record in records), default=0.0) / max(len(records), 1)  # 0: all at once
    arrival_rate = sum(1 for record in records) / len(run.records) / last if last > 0 else 0.0
    doubts = []
    measured, word = (gaps.median, "ITL") if gaps.median > 0 else (ttfts.median, "TTFT")
    limit = max(LAG_LEAST, LAG_SHARE * measured)
    lag = percentile(loop.ordered, 99)
    if lag > limit:
        doubts.append(
            f"its event loop was late by {lag * 1e3:.1f} ms at the 99th percentile, which is more than {limit * 1e3:.1f} ms"
            f" (the median {word} is {measured * 1e3:.1f} ms)"
        )
    late = percentile(arrival.ordered, 99)
    if gap and late > max(LAG_LEAST, LAG_SHARE * gap):
        doubts.append(f"it sent requests up to {late * 1e3:.1f} ms after their time (99th percentile)")
    if cpu > BUSY:
        doubts.append(f"it was busy for {cpu:.0%} of one core")
    events = sum(len(record.events) for record in records) / max(run.duration, 1e-9)
    return SelfCheck(arrival, loop, cpu, run.rate, arrival_rate, events, tuple(doubts))


def errors(records: Iterable[Record], most: int = 10) -> list[tuple[str, int]]:
    """The texts of failures, the most frequent first."""
    return Counter(record.error for record in records if record.error and record.finished).most_common(most)
