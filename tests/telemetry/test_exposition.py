"""A scrape: exemplars, its escapes, its pieces, and the limit of what can be in it."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.core.outcome import Outcome
from gateway.telemetry import exposition
from gateway.telemetry import metrics as module
from gateway.telemetry.exposition import PART_WORTH, PIECE
from gateway.telemetry.histogram import B_TTFT, Histogram
from gateway.telemetry.metrics import BackendSample
from gateway.telemetry.page import OPENMETRICS, Page, labels, sample
from tests.telemetry.fakes import FakeMeter, House, ended, stream
from tests.telemetry.test_metrics import scrape, value

TRACE = "0af7651916cd43dd8448eb211c80319c"
PAIR = {"model": "llama", "backend": "b1"}


def pieces(house_metrics: module.Metrics, accept: str | None = None) -> list[bytes]:
    return list(house_metrics.render(accept)[0])


def test_exemplars_name_the_trace_in_its_buckets() -> None:
    metrics = House().metrics()
    traced = stream(FakeMeter(tpot=0.025, events=3, output_tokens=3), trace_id=TRACE, sampled=True)
    metrics.ended(ended(traced))
    metrics.ended(ended(stream(trace_id="f" * 32)))  # of a trace that nobody keeps
    families = parse_openmetrics(b"".join(pieces(metrics, OPENMETRICS)).decode())  # type: ignore[no-untyped-call]
    found = {
        (each.name.removeprefix("tokenpipe_"), each.labels["le"]): each.exemplar
        for family in families
        for each in family.samples
        if each.exemplar is not None
    }
    assert {key: (e.labels, e.value, float(e.timestamp)) for key, e in found.items()} == {
        ("time_to_first_token_seconds_bucket", "0.5"): ({"trace_id": TRACE}, 0.5, 1_800_000_000.0),
        ("time_per_output_token_seconds_bucket", "0.025"): ({"trace_id": TRACE}, 0.025, 1_800_000_000.0),
        ("request_duration_seconds_bucket", "2.0"): ({"trace_id": TRACE}, 2.0, 1_800_000_000.0),
    }
    plain = b"".join(pieces(metrics))
    assert TRACE.encode() not in plain
    assert value(scrape(metrics), "request_duration_seconds_count", **PAIR, outcome="complete") == 2


def test_the_newest_exemplar_stays() -> None:
    histogram = Histogram(B_TTFT)
    for number in range(3):
        histogram.observe(700.0 + number)
        histogram.exemplify(700.0 + number, f"{number:032x}", 10.0 + number)
    text = Page(openmetrics=True).histogram("x", "", histogram)
    assert text.count("#") == 1
    assert f'x_bucket{{le="+Inf"}} 3 # {{trace_id="{2:032x}"}} 702.0 12.000\n' in text


HOSTILE = ['a"b', "a\\b", "a\nb", "100%", "%d", "{}", 'le="0"', "\u2028é", "a,b}", "\x01", ""]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("openmetrics", [False, True])
def test_labels_come_back_as_they_were(name: str, openmetrics: bool) -> None:
    page, histogram = Page(openmetrics), Histogram((1.0,))
    histogram.observe(0.5)
    inside = labels(("model", "backend"), (name, "b"))
    text = page.family("x", "histogram", "One \\ two\nlines.") + page.histogram("x", inside, histogram)
    text += page.family("y", "counter", "H.") + sample("y_total", inside, 3) + page.end
    parse = parse_openmetrics if openmetrics else parse_text
    one, other = parse(text)  # type: ignore[no-untyped-call]
    assert one.documentation == "One \\ two\nlines."
    assert [(each.labels, each.value) for each in other.samples] == [({"model": name, "backend": "b"}, 3)]
    assert [(each.name, each.labels.get("le"), each.labels["model"], each.value) for each in one.samples] == [
        ("x_bucket", "1.0", name, 1), ("x_bucket", "+Inf", name, 1), ("x_count", None, name, 1), ("x_sum", None, name, 0.5),
    ]  # fmt: skip


def large_house(models: int = 30) -> tuple[House, module.Metrics]:
    house = House()
    house.models = [f"m{number}" for number in range(models)]
    house.backends = [BackendSample(f"b{number}", True, "up", 1, 1) for number in range(10)]
    metrics = house.metrics()
    for model in house.models:
        for backend in house.backends:
            for outcome in (Outcome.COMPLETE, Outcome.UPSTREAM_RESET, Outcome.CLIENT_GONE):
                metrics.ended(ended(stream(FakeMeter([0.02]), model=model, backend=backend.name), outcome))
    return house, metrics


def test_no_piece_is_large() -> None:
    """Between two of them the event loop goes on: so none may hold more than a bounded amount of work."""
    _, metrics = large_house()
    made = pieces(metrics)
    text = b"".join(made)
    assert len(text) > 20 * PIECE
    assert max(map(len, made)) < PIECE + 8192  # one more part: a histogram
    assert text.endswith(b"\n")
    lines = [line.rpartition(b" ")[0] for line in text.splitlines()]
    assert len(set(lines)) == len(lines), "something was rendered twice"
    # Looking at exchanges is work that writes nothing: it is cut, too.
    most = PIECE // PART_WORTH
    looked: list[int] = []

    def live() -> object:
        for number in range(1000):
            looked.append(number)
            yield stream(model="m1", backend="b1")

    metrics.sources = metrics.sources._replace(live=live)  # type: ignore[arg-type]
    rendering, _ = metrics.render(None)
    for piece in rendering:
        if len(looked) == 1000:
            break
        assert piece == b""
        assert len(looked) % most == 0
    assert len(looked) == 1000


@pytest.mark.parametrize("backends", [8, 200])
def test_between_two_pieces_few_series_are_named(monkeypatch: pytest.MonkeyPatch, backends: int) -> None:
    """Also what is prepared for later is cut: the labels of all pairs in one go, or of all backends, held streams up."""
    house, metrics = large_house()
    house.backends = [BackendSample(f"b{number}", True, "up", 1, 1) for number in range(backends)]
    named: list[int] = [0]

    def counted(*of: object) -> str:
        named[0] += 1
        return labels(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(exposition, "labels", counted)
    for _ in metrics.render(None)[0]:
        assert named[0] <= 3 * PIECE // PART_WORTH
        named[0] = 0


def test_a_scrape_bears_what_happens_between_its_pieces() -> None:
    """Exchanges end, others begin, models come, while it is made."""
    house, metrics = large_house(models=4)
    exchange = stream(FakeMeter([0.03]), model="m1", backend="b1")
    house.live = [exchange, *[stream(model="m2", backend="b2") for _ in range(200)]]
    rendering, _ = metrics.render(None)
    made = [next(rendering)]
    metrics.ended(ended(exchange))
    house.models.append("new")
    for number, piece in enumerate(rendering):
        made.append(piece)
        for reason in ("upstream_reset", f"reason-{number}"):
            metrics.failed(exchange, reason)
            metrics.retried(exchange, reason)
        for _ in range(module.TAKEN_AT):
            metrics.ended(ended(stream(model="new", backend="b1", status=200 + number), Outcome.UPSTREAM_STATUS))
    for family in parse_text(b"".join(made).decode()):
        if family.type == "histogram":
            numbers = {(each.name, *sorted(each.labels.items())): each.value for each in family.samples}
            for (name, *pairs), number in numbers.items():
                if ("le", "+Inf") in pairs:
                    rest = [pair for pair in pairs if pair[0] != "le"]
                    assert numbers[(name.removesuffix("_bucket") + "_count", *rest)] == number
    samples = scrape(metrics)
    assert value(samples, "inter_token_latency_seconds_count", model="m1", backend="b1") == 3 + 1


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 4)
    house = House()
    house.models = ["a", "b", "c"]
    house.backends = [BackendSample(f"b{number}", True, "up", 1, 1) for number in range(3)]
    metrics = house.metrics()
    for _ in range(2):
        for model in house.models:
            for backend in house.backends:
                metrics.ended(ended(stream(model=model, backend=backend.name)))
    samples = scrape(metrics)
    ends = {"outcome": "complete", "code": "200"}
    assert value(samples, "requests_total", model="a", backend="b1", **ends) == 2
    assert value(samples, "requests_total", model="other", backend="other", **ends) == 10
    assert len(metrics.series) == 5
    # One backend goes and another one comes: that makes room, for what had none before, too.
    house.backends = [*house.backends[1:], BackendSample("new", True, "up", 1, 1)]
    metrics.ended(ended(stream(model="c", backend="new")))
    metrics.ended(ended(stream(model="c", backend="b2")))
    samples = scrape(metrics)
    assert value(samples, "requests_total", model="c", backend="new", **ends) == 1
    assert value(samples, "requests_total", model="a", backend="b1", **ends) == 2
    assert value(samples, "requests_total", model="a", backend="b0", **ends) is None
    assert len(metrics.series) <= 5
