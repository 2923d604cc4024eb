"""The result as others read it: the JSON and the table of `vllm bench serve`, with what is ours kept apart.

Field names, their order and their units (seconds in lists, milliseconds in aggregates) are those of vllm/benchmarks/serve.py.
Everything of ours is under the one key `tokenpipe`, so that no reader takes one for the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gateway import __version__
from gateway.errors import ConfigError
from gateway.loadtest.compare import Difference, Estimate
from gateway.loadtest.endpoints import generated_text
from gateway.loadtest.records import Record, Run
from gateway.loadtest.settings import Settings
from gateway.loadtest.statistics import Metrics, SelfCheck, Spread, SuccessRule, errors

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run, measured: of each endpoint its figures; how they differ, if there are two; and the tester itself."""

    run: Run
    metrics: tuple[Metrics, ...]
    succeeded: SuccessRule
    check: SelfCheck
    differences: tuple[Difference, ...] = ()


def word(percent: float) -> str:
    return f"p{int(percent) if percent == int(percent) else percent}"


def shown_metrics(settings: Settings, run: Run) -> list[str]:
    """Those that were asked for, and that mean something in this run."""
    left_out = set()
    if settings.max_concurrency is None:
        left_out |= {"client_queue_time", "e2el_including_client_queue"}
    elif math.isinf(run.rate) and settings.ramp is None:
        left_out.add("e2el_including_client_queue")
    return [name for name in METRICS if name in settings.percentile_metrics and name not in left_out]


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(settings: Settings, model: str, measured: Measured) -> dict[str, Any]:
    """One run's result."""
    run, ramp = measured.run, settings.ramp
    result: dict[str, Any] = {
        "date": run.began.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": settings.backend,
        "backend": settings.backend,
        "label": settings.label,
        "model_id": settings.model_id or model,
        "tokenizer_id": settings.tokenizer,
        "num_prompts": run.asked,
        **dict(settings.metadata),
        "request_rate": "inf" if math.isinf(run.rate) else run.rate,
        "burstiness": "inf" if math.isinf(settings.burstiness) else settings.burstiness,
        "max_concurrency": settings.max_concurrency,
    }
    if ramp is not None:
        result["ramp_up_strategy"] = "exponential" if ramp.exponential else "linear"
        result["ramp_up_start_rps"], result["ramp_up_end_rps"] = ramp.start, ramp.end
    result |= _vllm_fields(settings, measured, 0)
    if run.rates:
        began = run.began.timestamp()
        result["rps_change_events"] = [
            {"rps": rate, "timestamp": _local(began + after)} for rate, after in run.rates if after <= run.duration
        ]
    result |= _aggregates(settings, measured, 0)
    if not settings.save_detailed:
        for name in _DETAILS:
            del result[name]
    result["tokenpipe"] = _ours(settings, measured)
    return result


def _local(timestamp: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(timestamp).isoformat()  # noqa: DTZ006  (vLLM's is local and naive, too)


def _vllm_fields(settings: Settings, measured: Measured, which: int) -> dict[str, Any]:
    metrics, records = measured.metrics[which], [r for r in measured.run.records[which] if r.finished]
    good = [measured.succeeded(record) for record in records]
    detailed = settings.save_detailed
    return {
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "input_lens": [r.prompt_len if r.prompt_tokens is None else r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens if ok else 0 for r, ok in zip(records, good, strict=True)],
        "ttfts": [r.ttft or 0.0 for r in records],
        "itls": [r.gaps for r in records] if detailed else [],
        "latencies": [r.latency or 0.0 for r in records],
        "start_times": [r.started for r in records],
        "queue_times": [r.queued for r in records],
        "generated_texts": [generated_text(settings.kind, r.body) for r in records] if detailed else [],
        "errors": [r.error for r in records],
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
        "rtfx": 0.0,
    }


def _aggregates(settings: Settings, measured: Measured, which: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in shown_metrics(settings, measured.run):
        found |= _milliseconds(name, getattr(measured.metrics[which], name))
    return found


def _milliseconds(name: str, values: Spread) -> dict[str, float]:
    return {
        f"mean_{name}_ms": values.mean * 1e3,
        f"median_{name}_ms": values.median * 1e3,
        f"std_{name}_ms": values.std * 1e3,
        **{f"{word(percent)}_{name}_ms": value * 1e3 for percent, value in values.percentiles},
    }


def _ours(settings: Settings, measured: Measured) -> dict[str, Any]:
    run, metrics = measured.run, measured.metrics[0]
    ours: dict[str, Any] = {
        "version": __version__,
        "url": settings.url,
        "success_rule": settings.success,
        "interrupted": run.interrupted,
        **_own_figures(metrics),
        "generator": _generator(measured.check),
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "date": run.began.isoformat(),
            "dataset": settings.dataset.name,
            "seed": settings.dataset.seed,
        },
    }
    if settings.save_detailed:
        ours["requests"] = [_request(record) for record in run.records[0]]
    if len(measured.metrics) > 1:
        second = _vllm_fields(settings, measured, 1)
        kept = {name: value for name, value in second.items() if settings.save_detailed or name not in _DETAILS}
        ours["compare"] = {
            "url": settings.compare,
            "confidence": 0.95,
            "differences": {each.name: _difference(each) for each in measured.differences},
            "second": {**kept, **_aggregates(settings, measured, 1), **_own_figures(measured.metrics[1])},
        }
    return ours


def _own_figures(metrics: Metrics) -> dict[str, Any]:
    return {
        "outcomes": metrics.outcomes,
        "abandoned": metrics.abandoned,
        "statuses": {str(status): count for status, count in metrics.statuses.items()},
        "output_token_sources": metrics.token_sources,
        "prompt_token_sources": metrics.prompt_sources,
        "tpot_skipped": metrics.tpot_skipped,
        "events": metrics.events,
        "events_per_read": metrics.events / metrics.reads if metrics.reads else None,
        **_milliseconds("tpot_adjusted", metrics.tpot_adjusted),
        **_milliseconds("duration", metrics.duration_to_end),
        **_milliseconds("ttfv", metrics.first_visible),
        **_milliseconds("max_gap", metrics.max_gap),
        **_milliseconds("connect", metrics.connect),
    }


def _generator(check: SelfCheck) -> dict[str, Any]:
    return {
        "limited_by_generator": bool(check.doubts),
        "doubts": list(check.doubts),
        **{f"arrival_lag_{word(percent)}_ms": value * 1e3 for percent, value in check.arrival_lag.percentiles},
        **{f"loop_lag_{word(percent)}_ms": value * 1e3 for percent, value in check.loop_lag.percentiles},
        "cpu": check.cpu,
        "asked_rps": "inf" if math.isinf(check.asked_rate) else check.asked_rate,
        "arrived_rps": check.arrival_rate,
        "events_per_second": check.events_per_second,
    }


def _request(record: Record) -> dict[str, Any]:
    return {
        "index": record.index,
        "scheduled": record.scheduled,
        "arrived": record.arrived,
        "started": record.started,
        "sent": record.sent,
        "head": record.head,
        "first_byte": record.first_byte,
        "first_visible": record.first_visible,
        "ended": record.ended,
        "outcome": record.outcome.value,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "token_source": record.token_source,
        "tpot_adjusted": record.tpot,
        "tpot_skipped": record.tpot_skipped,
        "fresh_connection": record.fresh,
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "pairs": difference.pairs,
        "mean_ms": _estimate(difference.mean),
        **{f"{word(percent)}_ms": _estimate(estimate) for percent, estimate in difference.percentiles},
    }


def _estimate(estimate: Estimate) -> list[float | None]:
    """Value, and the ends of its interval."""
    return [None if value is None else value * 1e3 for value in (estimate.value, estimate.low, estimate.high)]


def result_path(settings: Settings, model: str, run: Run) -> Path:
    """vLLM's name for the file, or the one that was asked for; with several rates, that one with the rate in it."""
    rate = "inf" if math.isinf(run.rate) else str(float(run.rate))
    if settings.result_filename:
        name = Path(settings.result_filename)
        if len(settings.rates) > 1 and not settings.append_result:
            name = name.with_name(f"{name.stem}-{rate}qps{name.suffix}")
    else:
        most = "" if settings.max_concurrency is None else f"-concurrency{settings.max_concurrency}"
        ramp = settings.ramp
        if ramp is not None:
            strategy = "exponential" if ramp.exponential else "linear"
            traffic = f"ramp-up-{strategy}-{ramp.start:g}qps-{ramp.end:g}qps"
        else:
            traffic = f"{rate}qps"
        began = run.began.strftime("%Y%m%d-%H%M%S")
        name = Path(
            f"{settings.label or settings.backend}-{traffic}{most}-{(settings.model_id or model).split('/')[-1]}-{began}.json"
        )
    return settings.result_dir / name if settings.result_dir else name


def save(path: Path, result: dict[str, Any], append: bool) -> None:
    """One JSON object; with `append` one more line of a file that may have some. Raises ConfigError."""
    text = json.dumps(result, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+" if append else "w", encoding="utf-8") as file:
            file.write(f"\n{text}" if append and file.tell() else text)
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error.strerror or error}") from None


# -- the table ---------------------------------------------------------------------------------------------------------

Say = Callable[[str], None]


def _row(label: str, value: float | str) -> str:
    """vLLM's: the label in 40 columns; whole numbers as they are, others with two digits."""
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def _header(text: str, fill: str = "-") -> str:
    return f"{text:{fill}^50}"


def table(settings: Settings, measured: Measured) -> str:
    """All that one run has to say, in vLLM's order first."""
    lines: list[str] = []
    for which, url in enumerate(settings.urls):
        if len(settings.urls) > 1:
            lines += ["", f"{'first' if which == 0 else 'second'} endpoint: {url}"]
        lines += _serving(settings, measured, which)
    if measured.differences or len(settings.urls) > 1:
        lines += _differences(measured.differences)
    lines += _tester(measured.check)
    return "\n".join(lines)


def _serving(settings: Settings, measured: Measured, which: int) -> list[str]:
    run, metrics = measured.run, measured.metrics[which]
    lines = [_header(" Serving Benchmark Result ", "=")]
    lines += [_row("Successful requests:", metrics.completed), _row("Failed requests:", metrics.failed)]
    if metrics.abandoned:
        lines.append(_row("Abandoned at the interrupt:", metrics.abandoned))
    if settings.max_concurrency is not None:
        lines.append(_row("Maximum request concurrency:", settings.max_concurrency))
    if not math.isinf(run.rate):
        lines.append(_row("Request rate configured (RPS):", float(run.rate)))
    lines += [
        _row("Benchmark duration (s):", metrics.duration),
        _row("Total input tokens:", metrics.total_input),
        _row("Total generated tokens:", metrics.total_output),
        _row("Request throughput (req/s):", metrics.request_throughput),
    ]
    if metrics.request_goodput is not None:
        lines.append(_row("Request goodput (req/s):", metrics.request_goodput))
    lines += [
        _row("Output token throughput (tok/s):", metrics.output_throughput),
        _row("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        _row("Peak concurrent requests:", float(metrics.max_concurrent_requests)),
        _row("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    for name in shown_metrics(settings, run):
        label, title = METRICS[name]
        values: Spread = getattr(metrics, name)
        lines += [_header(title), _row(f"Mean {label} (ms):", values.mean * 1e3)]
        lines.append(_row(f"Median {label} (ms):", values.median * 1e3))
        lines += [_row(f"{word(at).upper()} {label} (ms):", value * 1e3) for at, value in values.percentiles if at != 50]
    lines += _failures(measured.run.records[which], metrics)
    lines.append(_header("Token counts from"))
    lines.append(_row("Output tokens:", _sources(metrics.token_sources, "events: one an output event, a lower bound")))
    lines.append(_row("Input tokens:", _sources(metrics.prompt_sources, "estimated: no usage came for them")))
    if metrics.tpot_adjusted.count and abs(metrics.tpot_adjusted.mean - metrics.tpot.mean) > 0.01 * metrics.tpot.mean:
        lines.append(_row("Mean TPOT, first event's tokens out (ms):", metrics.tpot_adjusted.mean * 1e3))
    lines.append("=" * 50)
    return lines


def _sources(sources: dict[str, int], explained: str) -> str:
    text = ", ".join(f"{name} {count}" for name, count in sources.items()) or "none"
    return f"{text} ({explained})" if explained.partition(":")[0] in sources else text


def _failures(records: Sequence[Record], metrics: Metrics) -> list[str]:
    if not metrics.failed:
        return []
    lines = [_header("Failures by outcome")]
    lines += [_row(f"{name}:", count) for name, count in metrics.outcomes.items() if name not in ("complete", "client_gone")]
    lines += [f"  {count} x {_one_line(text)}" for text, count in errors(records)]
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())[:160]


def _differences(differences: Sequence[Difference]) -> list[str]:
    lines = ["", _header(" What the first endpoint adds ", "="), "(first minus second, pair by pair, in ms; 95 % confidence)"]
    for difference in differences:
        lines.append(_header(f"{difference.name.upper()}, {difference.pairs} pairs"))
        lines.append(_row("Mean:", _with_interval(difference.mean)))
        lines += [_row(f"{word(at).upper()} of the differences:", _with_interval(it)) for at, it in difference.percentiles]
    if not differences:
        lines.append("no pair of which both requests succeeded")
    lines.append("=" * 50)
    return lines


def _with_interval(estimate: Estimate) -> str:
    if estimate.low is None and estimate.high is None:
        return f"{estimate.value * 1e3:+.3f} [too few pairs]"
    low, high = ("?" if end is None else f"{end * 1e3:+.3f}" for end in (estimate.low, estimate.high))
    return f"{estimate.value * 1e3:+.3f} [{low}, {high}]"


def _tester(check: SelfCheck) -> list[str]:
    arrival, loop = dict(check.arrival_lag.percentiles), dict(check.loop_lag.percentiles)
    lines = [
        _header("The load tester itself"),
        _row("Arrival lag P50 / P99 / max (ms):", " / ".join(f"{arrival[at] * 1e3:.2f}" for at in (50, 99, 100))),
        _row("Event loop lag P50 / P99 / max (ms):", " / ".join(f"{loop[at] * 1e3:.2f}" for at in (50, 99, 100))),
        _row("Processor time (share of one core):", f"{check.cpu:.0%}"),
        _row("Output events received (events/s):", check.events_per_second),
    ]
    if check.doubts:
        lines += ["WARNING: the load tester's own machine, not only the endpoint, limited this run:"]
        lines += [f"  {doubt}" for doubt in check.doubts]
        lines += ["  The latencies are upper bounds, the throughputs lower bounds. Load less, or from a machine that is idle."]
    lines.append("=" * 50)
    return lines
