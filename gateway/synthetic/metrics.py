"""The engine's figures under vLLM's own names, in a registry of their own.

What reads a vLLM (a dashboard, an endpoint picker, a load-aware router) must be able to read this one. What begins with
`tokenpipe_mock_` is ours: clients that left, which vLLM counts nowhere, the faults that happened, and hand-offs of KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from gateway.synthetic.faults import CATALOGUE
from gateway.synthetic.tally import Count, Tally

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"
BLOCK_SIZE: Final = 16
BLOCKS: Final = 65_536
FINISHED: Final = ("stop", "length", "abort", "error", "repetition")

_LABELS = ("model_name", "engine")
_FINE = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT = (*_FINE, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class EngineMetrics:
    """One attribute a series, bound to its labels already: the hot path pays for no look-up."""

    def __init__(self, model: str):
        self._registry = registry = CollectorRegistry()
        self._model = model

        self.running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of requests waiting to be processed, by reason.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self.waiting_by_reason = {reason: by_reason.labels(model, "0", reason) for reason in ("capacity", "deferred")}
        self.prefix_queries = self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.")
        self.drafts = self._counter("spec_decode_num_drafts", "Number of spec decoding drafts.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Number of draft tokens.")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.")
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Number of generation tokens processed.")
        self.preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self.success = {reason: success.labels(model, "0", reason) for reason in FINISHED}
        self.ttft = self._histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT)
        self.itl = self._histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _GAP)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", _GAP
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _WHOLE)
        self.queue_time = self._histogram("request_queue_time_seconds", "Time spent in WAITING phase.", _WHOLE)
        self.inference_time = self._histogram("request_inference_time_seconds", "Time spent in RUNNING phase.", _WHOLE)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Time spent in PREFILL phase.", _WHOLE)
        self.decode_time = self._histogram("request_decode_time_seconds", "Time spent in DECODE phase.", _WHOLE)
        self.request_prompt = self._histogram("request_prompt_tokens", "Number of prefill tokens processed.", _TOKENS)
        self.request_generation = self._histogram(
            "request_generation_tokens", "Number of generation tokens processed.", _TOKENS
        )
        Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            ("engine", "block_size", "num_gpu_blocks"),
            registry=registry,
        ).labels("0", str(BLOCK_SIZE), str(BLOCKS)).set(1)
        self.aborted = Counter(
            "tokenpipe_mock_aborted_requests", "Requests whose client left before the end.", registry=registry
        )

        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests that the limit on queued requests turned away.",
            ("model_name", "reason"),
            registry=registry,
        ).labels(model, "max_num_queued_reqs")
        faults = Counter(
            "tokenpipe_mock_faults_injected", "Faults that happened, of those in deploy/mock.md.", ("fault",), registry=registry
        )
        self.faults = {name: faults.labels(name) for name in CATALOGUE}

    def kv(self, held: Callable[[], int]) -> dict[str, Counter]:
        """The series of a ledger: blocks held for a decoder now, and hand-offs by how they ended."""
        gauge = Gauge("tokenpipe_mock_kv_held_requests", "Prefills whose KV waits for a decoder.", registry=self._registry)
        gauge.set_function(held)
        family = Counter(
            "tokenpipe_mock_kv_handoffs", "Prefills held for a decoder, by end.", ("end",), registry=self._registry
        )
        self.kv_recomputed = Counter(
            "tokenpipe_mock_kv_recomputed",
            "Prompts that a decoder computed though a prefill was to have done it.",
            registry=self._registry,
        )
        self.kv_failed = self._counter("nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers.")
        self.kv_expired = self._counter("nixl_num_kv_expired_reqs", "Requests whose KV blocks expired before they were read.")
        return {end: family.labels(end) for end in ("pulled", "rejected", "expired", "aborted")}

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(self._model, "0")

    def _counter(self, name: str, text: str) -> Count:
        return Count(f"vllm:{name}", text, dict(zip(_LABELS, (self._model, "0"), strict=True)), self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Tally:
        labels = dict(zip(_LABELS, (self._model, "0"), strict=True))
        return Tally(f"vllm:{name}", text, labels, buckets, self._registry)
