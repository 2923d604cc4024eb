"""What is counted of disaggregated prefill and decode (`net.paired.PairObserver`), and how a scrape shows it.

Where the time to the first token goes: queue_seconds, then from prefill's request written to its answer read (prefill), to
decode's request written (handoff: the gateway's and the network's), to the first octet of decode's body (decode_first_byte: its
queue, the transfer, and a step). The last is an upper bound on the transfer, which only engines can tell
(`vllm:nixl_xfer_time_seconds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from gateway.core.exchange import Exchange
from gateway.telemetry.histogram import B_OVH, B_TTFT, Histogram
from gateway.telemetry.page import Page, labels, sample

PREFIX = "tokenpipe_pd_"
MOST = 64  # pairs of a model and a connector
FOLD_AT = 128  # times that are counted at once: of 32 exchanges
_Labels = tuple[str, str]

_TIMES = (
    ("encode", "The encoders' first request begun to the last of their answers read.", B_TTFT),
    ("prefill", "Prefill's request written to its whole answer read.", B_TTFT),
    ("handoff", "Prefill's answer read to decode's request written: the gateway's part, not the transfer of KV.", B_OVH),
    (
        "decode_first_byte",
        "Decode's request written to the first octet of its body: queue, transfer of KV and one step.",
        B_TTFT,
    ),
)
_BOUNDS = {name: bounds for name, _, bounds in _TIMES}
_COUNTERS = (
    ("aborts", "Clients that left, by where the pair of legs stood.", "phase"),
    ("release", "Legs that had KV freed whose client had left, by what came of it.", "result"),
    ("stranded", "Hand-offs that nobody took up: KV lies on the prefill engine until its time is over.", "connector"),
    ("stranded_tokens", "Prompt tokens of these, about.", "connector"),
    ("fallback", "Requests whose prompt decode computed itself, as disaggregation.local_decode_fallback allows.", "reason"),
    ("bypass", "Requests that one backend served by choice.", "reason"),
    ("recomputed", "Times that an engine said that it dropped the request (vLLM Ascend's recomputed).", ""),
    ("resumed", "What came of these, where disaggregation.recompute is resume: done, or why it was passed on.", "result"),
)


class PairTallies:
    """`label_of`: what a model is counted under. Times are counted with others soon (`fold`), at half the cost."""

    def __init__(self, label_of: Callable[[str | None], str], inflight: Callable[[], int] = lambda: 0):
        self._label_of = label_of
        self.inflight = inflight  # release legs and detached decode legs now
        self._told: list[tuple[str, str | None, str, float]] = []  # not counted yet: which time, model, connector, seconds
        self._times: dict[str, dict[_Labels, Histogram]] = {name: {} for name, _, _ in _TIMES}
        self._hold: dict[str, Histogram] = {}
        self.counts: dict[str, Counter[str]] = {name: Counter() for name, _, _ in _COUNTERS}

    # the data path tells

    def bypassed(self, reason: str) -> None:
        self.counts["bypass"][reason] += 1

    def fell_back(self, reason: str) -> None:
        self.counts["fallback"][reason] += 1

    def encoded(self, exchange: Exchange, connector: str, seconds: float) -> None:
        self._tell("encode", exchange.model, connector, seconds)

    def prefilled(self, exchange: Exchange, connector: str, seconds: float) -> None:
        self._tell("prefill", exchange.model, connector, seconds)

    def handed_over(self, exchange: Exchange, connector: str, seconds: float) -> None:
        self._tell("handoff", exchange.model, connector, seconds)

    def decoding(self, exchange: Exchange, connector: str, seconds: float) -> None:
        self._tell("decode_first_byte", exchange.model, connector, seconds)

    def held(self, connector: str, seconds: float) -> None:
        self._tell("hold", None, connector, seconds)

    def parted(self, phase: str) -> None:
        self.counts["aborts"][phase] += 1

    def released(self, result: str) -> None:
        self.counts["release"][result] += 1

    def stranded(self, connector: str, tokens: int) -> None:
        self.counts["stranded"][connector] += 1
        self.counts["stranded_tokens"][connector] += tokens

    def recomputed(self) -> None:
        self.counts["recomputed"][""] += 1

    def resumed(self, result: str) -> None:
        self.counts["resumed"][result] += 1

    def _tell(self, name: str, model: str | None, connector: str, seconds: float) -> None:
        self._told.append((name, model, connector, seconds))
        if len(self._told) >= FOLD_AT:
            self.fold()

    def fold(self) -> None:
        """Count the times that have been told since the last time."""
        told, self._told = self._told, []
        alike: dict[tuple[str, str | None, str], list[float]] = {}
        for name, model, connector, seconds in told:
            alike.setdefault((name, model, connector), []).append(seconds)
        for (name, model, connector), times in alike.items():
            self.counts["stranded"][connector] += 0  # begins at zero, as what does not has no rate
            self._histogram(name, model, connector).observe_all(times)

    def _histogram(self, name: str, model: str | None, connector: str) -> Histogram:
        if name == "hold":
            return self._hold.setdefault(connector, Histogram(B_TTFT))
        found, pair = self._times[name], (self._label_of(model), connector)
        if pair not in found and len(found) >= MOST:
            pair = ("other", connector)
        return found.setdefault(pair, Histogram(_BOUNDS[name]))

    # the scrape

    def render(self, page: Page) -> Iterator[str]:
        self.fold()
        for name, help_, _ in _TIMES:
            yield page.family(f"{PREFIX}{name}_seconds", "histogram", help_)
            for pair, histogram in list(self._times[name].items()):
                yield page.histogram(f"{PREFIX}{name}_seconds", labels(("model", "connector"), pair), histogram)
        yield page.family(f"{PREFIX}kv_hold_seconds", "histogram", "Prefill's answer read to decode's first octet.")
        for connector, histogram in list(self._hold.items()):
            yield page.histogram(f"{PREFIX}kv_hold_seconds", labels(["connector"], [connector]), histogram)
        for name, help_, label in _COUNTERS:
            yield page.family(PREFIX + name, "counter", help_)
            counts = self.counts[name]
            if not label:
                yield sample(f"{PREFIX}{name}_total", "", counts[""])
                continue
            for word, n in list(counts.items()):
                yield sample(f"{PREFIX}{name}_total", labels([label], [word]), n)
        yield page.family(f"{PREFIX}release_inflight", "gauge", "Release legs, and decode legs without a client, now.")
        yield sample(f"{PREFIX}release_inflight", "", self.inflight())
