"""What an engine's own /metrics says of its load: a handful of lines of a page of a thousand.

vLLM: `num_requests_running`, `num_requests_waiting`, `kv_cache_usage_perc`, formerly `gpu_cache_usage_perc`, and
`engine_sleep_state` (vllm/v1/metrics/loggers.py), each for an `engine` of data parallelism. SGLang: `num_running_reqs`,
`num_queue_reqs`, `token_usage` (sglang/srt/metrics/collector.py), once for a `dp_rank`, and perhaps by each `tp_rank` of it,
which say the same.

Only these lines are looked at: a whole parse of such a page takes milliseconds, and what is odd elsewhere in it is nobody's
concern here.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from gateway.core.load import EngineLoad


class _Names(NamedTuple):
    running: bytes
    waiting: bytes
    kv_usage: tuple[bytes, ...]  # the newest first


_ENGINES: Final = (
    _Names(
        b"vllm:num_requests_running", b"vllm:num_requests_waiting", (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    ),
    _Names(b"sglang:num_running_reqs", b"sglang:num_queue_reqs", (b"sglang:token_usage",)),
)
_AWAKE: Final = re.compile(rb'^vllm:engine_sleep_state\{[^}\n]*sleep_state="awake"[^}\n]*\} +(\S+)', re.M)
_RANK: Final = re.compile(rb'[{,]\s*(?:engine|dp_rank)="([^"]*)"')
SAMPLES_MOST: Final = 1024  # of one name


def read(page: bytes) -> EngineLoad | None:
    """The load in a page of Prometheus' or OpenMetrics' text; None where it has none that is known."""
    page = b"\n" + page
    for names in _ENGINES:
        running = _samples(page, names.running)
        if running:
            usage = next(filter(None, (_samples(page, name) for name in names.kv_usage)), [])
            return EngineLoad(
                sum(running),
                sum(_samples(page, names.waiting)),
                sum(usage) / len(usage) if usage else 0.0,
                asleep(page),
            )
    return None


def asleep(page: bytes) -> bool | None:
    """Whether all engines of a vLLM sleep, as it says from 0.11 on; None where it does not say."""
    try:
        ranks = [float(value) for value in _AWAKE.findall(page)]
    except ValueError:
        return None
    return not any(ranks) if ranks else None


def of_another_engine(page: bytes) -> bool:
    """Whether the page is SGLang's, not vLLM's. One that has metrics of neither says nothing of who wrote it."""
    return b"\nsglang:" in b"\n" + page and b"vllm:" not in page


def _samples(page: bytes, name: bytes) -> list[float]:
    """The values of one name, one a rank; of several for the same rank the largest."""
    ranks: dict[bytes, float] = {}
    at = -1
    for _ in range(SAMPLES_MOST):
        at = page.find(b"\n" + name, at + 1)
        if at < 0:
            break
        begin = at + 1 + len(name)
        end = page.find(b"\n", begin)
        line = page[begin : end if end >= 0 else None]
        labels, brace, rest = line.rpartition(b"}")
        if line[:1] not in b"{ \t" or not (words := rest.split()):
            continue  # a longer name, or half a line
        try:
            value = float(words[0])
        except ValueError:
            continue
        if math.isfinite(value):
            rank = _RANK.search(labels) if brace else None
            key = rank[1] if rank else b""
            ranks[key] = max(ranks.get(key, 0.0), value)
    return list(ranks.values())
